"""`torchrun --nproc-per-node N -m experiments.imagenet --data DIR`, or without torchrun on one process.

Reads from top to bottom: the training loop, the optimizers and their learning rate, validation, the processes, and the
clock that measures the phases of a step.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from torch_anderson import Anderson, MovingAverage, Storage

from ..data import MissingData
from ..resnet import Residual, resnet50, small_resnet
from ..screen import UserError, complain
from .data import NO_LABEL, Images, Order, Share, loader, normalised
from .records import BadSettings, Checkpoints, Journal, Settings, share_buffers

OK, BAD_INPUT = 0, 2
LAPS = ("data", "forward_backward", "communication", "base_step", "acceleration")
NEVER = 2**62
"""A warm-up that does not end, so that only the average takes effect."""
TIMEOUT = timedelta(minutes=10)
"""Longest wait for another process: the slowest thing that one does alone is to read a large folder."""


def main(args: Sequence[str] | None = None) -> int:
    """Execute a command line; returns the exit code. Errors that users can fix are printed without a traceback."""
    logging.basicConfig(format="%(message)s")
    try:
        settings = tyro.cli(Settings, args=args, prog="experiments.imagenet")
        with process_group() as device:
            Training(settings, device).run()
    except (UserError, MissingData) as error:
        complain(f"experiments.imagenet: {error}")
        return BAD_INPUT
    return OK


class Training:
    """A run: a model, its optimizer and its data, and where it stands.

    ``position`` is the same on all processes: the epoch, how many of its images are done, and the steps of the whole
    run. Each process adds up for itself, from the beginning of the epoch, its losses and the files that it cannot read.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.position = {"epoch": 0, "images": 0, "step": 0}
        self.clock = Clock(device)
        self.journal = Journal(settings)
        rank, world, batch, limit = dist.get_rank(), dist.get_world_size(), settings.batch_size, settings.limit_batches
        images = Images(settings.data, "train", settings.image_size, settings.seed, augment=True)
        unseen = Images(settings.data, "val", settings.image_size, settings.seed, augment=False)
        self.order = Order(len(images), batch, rank, world, settings.seed, limit)
        self.batches = loader(images, self.order, settings.workers)
        self.unseen = loader(unseen, Share(len(unseen), batch, rank, world, limit), settings.workers)
        self.model = make_model(settings, len(images.classes), device, self.clock)
        self.optimizer = make_optimizer(settings, self.model.parameters())
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "float16")
        self.clock.watch(self.optimizer)
        self.checkpoints = Checkpoints(settings.out / "checkpoints", self.model, self.optimizer)
        self.begin_epoch()

    def run(self) -> None:
        """Train to the end, from the latest checkpoint if there is one."""
        self.resume()
        while self.position["epoch"] < self.settings.epochs:
            self.train_epoch()
            record = self.record()
            with self.autocast():
                record["validation"] = validate(self.model, self.unseen, self.device)
            self.journal.epoch(record)
            self.position.update(epoch=self.position["epoch"] + 1, images=0)
            self.begin_epoch()
        self.save()
        self.export()

    def begin_epoch(self) -> None:
        """Count from 0."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.steps = self.corrupt = 0
        self.clock.reset()

    def train_epoch(self) -> None:
        """Make the steps that are left of the present epoch."""
        self.order.epoch, self.order.first = self.position["epoch"], self.position["images"]
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.model.train()
        self.clock.start()
        for images, labels, skipped in self.batches:
            loss = self.step(normalised(images.to(self.device)), labels.to(self.device))
            self.loss_sum += loss
            self.steps += 1
            self.corrupt += int(skipped.sum())
            self.position["images"] += self.order.step
            self.position["step"] += 1
            self.journal.step(self.position["epoch"], *self.order.steps(self.position["images"]), loss)
            if self.position["step"] % self.settings.checkpoint_every == 0:
                self.save()
                self.clock.start()

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch; returns its loss."""
        self.clock.lap("data")
        self.optimizer.zero_grad()
        with self.autocast():
            loss = LOSSES[self.settings.loss](self.model(images), labels)
        self.scaler.scale(loss).backward()
        # DDP has ended the lap of the backward pass itself, when the last gradients were ready.
        self.clock.lap("communication" if self.settings.strategy == "ddp" else "forward_backward")
        self.scaler.unscale_(self.optimizer)
        self.clock.lap("base_step")
        self.scaler.step(self.optimizer)
        self.clock.lap("acceleration" if isinstance(self.optimizer, Anderson) else "base_step")
        self.scaler.update()
        return loss.detach()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward passes."""
        dtype = getattr(torch, self.settings.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    @property
    def rate(self) -> float:
        """The learning rate of this epoch."""
        return rate_at(self.settings, self.position["epoch"], self.order.step)

    def record(self) -> dict[str, Any]:
        """The numbers of an epoch, over all processes; seconds are their mean."""
        world = dist.get_world_size()
        counts = summed(self.counts(), self.device)
        steps, loss, corrupt = (counts.pop(name) for name in ("steps", "loss", "corrupt"))
        seconds = {name: total / world for name, total in counts.items()}
        record = {"epoch": self.position["epoch"], "rate": self.rate, "loss": loss / steps, "corrupt": int(corrupt)}
        speed = steps * self.settings.batch_size / max(sum(seconds.values()), 1e-9)
        stats = self.optimizer.stats.as_dict() if isinstance(self.optimizer, Anderson) else {}
        return record | {"images_per_second": speed, "seconds": seconds, "stats": stats}

    def counts(self) -> dict[str, float]:
        """The sums of this process since the beginning of the epoch."""
        return {"steps": self.steps, "loss": self.loss_sum.item(), "corrupt": self.corrupt, **self.clock.collect()}

    def save(self) -> None:
        """Make a checkpoint."""
        common = {"position": self.position, "scaler": self.scaler.state_dict()}
        self.checkpoints.save(self.position["step"], common, self.counts())

    def resume(self) -> None:
        """Continue from the latest checkpoint, if there is one."""
        common: dict[str, Any] = {"position": self.position, "scaler": self.scaler.state_dict()}
        counts = self.counts()
        if not self.checkpoints.load(common, counts):
            return
        self.position = common["position"]
        self.scaler.load_state_dict(common["scaler"])
        self.steps, self.corrupt = int(counts.pop("steps")), int(counts.pop("corrupt"))
        self.loss_sum.fill_(counts.pop("loss"))
        self.clock.seconds.update(counts)
        self.journal.resumed(self.position)

    def export(self) -> None:
        """Leave the weights in one file, for everyone to load."""
        weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(weights, self.settings.out / "model.pt")


def binary_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of each class, as the paper writes: the mean over images and classes."""
    return functional.binary_cross_entropy_with_logits(scores, functional.one_hot(labels, scores.shape[1]).to(scores))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ce": functional.cross_entropy, "bce": binary_cross_entropy}


def make_optimizer(settings: Settings, parameters: Iterable[Tensor]) -> Optimizer:
    """Nesterov, or Anderson around it with the paper's options; ``BadSettings`` for options that they refuse."""
    try:
        rate, momentum, decay = settings.rate, settings.momentum, settings.weight_decay
        base = SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, nesterov=True)
        return base if settings.method == "base" else Anderson(base, **anderson_options(settings))
    except ValueError as error:
        raise BadSettings(str(error)) from error


def anderson_options(settings: Settings) -> dict[str, Any]:
    """The options of a method with acceleration, with the average, or with both."""
    options: dict[str, Any] = {"residual": "step"}
    if "average" in settings.method and settings.average_window > 0:
        options["average"] = MovingAverage(settings.average_window)
    if settings.storage_shard or settings.storage_device or settings.storage_dtype:
        dtype = getattr(torch, settings.storage_dtype) if settings.storage_dtype else None
        options["storage"] = Storage(device=settings.storage_device, dtype=dtype, shard=settings.storage_shard)
    if settings.method == "average":
        return options | {"warmup": NEVER, "history_size": 1, "safeguard": None}
    named = {name: getattr(settings, name) for name in ("history_size", "period", "store_period", "relaxation")}
    return options | named | {"safeguard": None if settings.safeguard == "none" else settings.safeguard}


def rate_at(settings: Settings, epoch: int, global_batch: int) -> float:
    """The paper's learning rate of an epoch, counted from 0, for a number of images per step over all processes.

    The paper gives 0.05 for 5 epochs, then 0.98 on 384 processes and 1.96 on 1,536, of 64 images each. Four times the
    batch has twice the rate: it is 0.05 times the square root of images per step over 64. It depends on nothing else,
    so checkpoints need not store it.
    """
    if epoch < settings.warmup_epochs:
        return settings.rate
    passed = sum(epoch >= milestone for milestone in settings.milestones)
    return settings.rate * math.sqrt(global_batch / 64) * 0.1**passed


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[list[Tensor]], device: torch.device) -> dict[str, float]:
    """Top-1 and top-5 accuracy and cross-entropy over all processes, and how many files could not be read."""
    share_buffers(model)
    model.eval()
    counts, sums = dict.fromkeys(("images", "corrupt"), 0.0), dict.fromkeys(("loss", "top1", "top5"), 0.0)
    for images, labels, skipped in batches:
        scores, labels = model(normalised(images.to(device))).float(), labels.to(device)
        known = labels != NO_LABEL
        scores, labels = scores[known], labels[known]
        counts["images"] += len(labels)
        counts["corrupt"] += int(skipped.sum())
        sums["loss"] += functional.cross_entropy(scores, labels, reduction="sum").item()
        sums["top1"] += hits(scores, labels, 1)
        sums["top5"] += hits(scores, labels, 5)
    total = summed(counts | sums, device)
    return {name: x / max(total["images"], 1) if name in sums else x for name, x in total.items()}


def hits(scores: Tensor, labels: Tensor, choices: int) -> int:
    """Number of labels among the best choices; all, if there are fewer classes than choices.

    >>> hits(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([2, 0]), 1)
    1
    """
    best = scores.topk(min(choices, scores.shape[1]), dim=1).indices
    return int((best == labels.unsqueeze(1)).any(1).sum())


def make_model(settings: Settings, classes: int, device: torch.device, clock: "Clock") -> nn.Module:
    """The network over all processes, with the weights of the seed: DDP, or FSDP2 block by block."""
    torch.manual_seed(settings.seed)
    model: nn.Module = (resnet50 if settings.model == "resnet50" else small_resnet)(classes).to(device)
    if settings.strategy == "ddp":
        model = wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(clock, timed_allreduce)
    else:
        for block in [module for module in model.modules() if isinstance(module, Residual)]:
            fully_shard(block)
        fully_shard(model)
    # DDP groups gradients anew after its first pass, in the order in which they came; with three processes and more,
    # the order of their sums depends on it. After a pass that changes nothing, a resumed run sums as any other does.
    model.eval()  # leaves BatchNorm's statistics alone
    model(torch.zeros(2, 3, settings.image_size, settings.image_size, device=device)).sum().backward()
    model.zero_grad()
    return model


def timed_allreduce(clock: "Clock", bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Sum gradients over the processes as DDP does; what follows the last call is communication alone."""
    clock.lap("forward_backward")
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def summed(numbers: dict[str, float], device: torch.device) -> dict[str, float]:
    """Sums over the processes."""
    total = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return dict(zip(numbers, total.tolist(), strict=True))


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The default group, of one process if torchrun has not started this; gives the device of this process."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    store, rank, world = meeting_place()
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world)
    try:
        yield device
        dist.barrier()  # none closes connections that others still need
    finally:
        dist.destroy_process_group()


def meeting_place() -> tuple[Any, int, int]:
    """The store in which processes find each other, the rank of this process, and their number.

    torchrun keeps one store for all its restarts, in which processes may find addresses of those that were killed
    (github.com/pytorch/pytorch/issues/135712). On one machine, where all processes agree on the number of restarts,
    each attempt has its own prefix.
    """
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    store, rank, world = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    return store, rank, world


class Clock:
    """Adds up the phases of training steps; each ends where the next begins, so that nothing is left out.

    On a GPU a phase ends with an event in the stream that is read later, so that training does not wait for it.

    - data: waiting for images and taking them to the device;
    - forward_backward: until the last gradients are ready (with FSDP2, including its collectives);
    - communication: with DDP, from there until they are summed over the processes, which no computation hides;
    - base_step: the step of the base optimizer and the scaling of gradients;
    - acceleration: the rest of the optimizer's step, including the collectives of the acceleration.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        """Count from 0."""
        self.seconds = dict.fromkeys(LAPS, 0.0)
        self.marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin the first lap here: what was since the last collection does not count."""
        self.marks = [("", self.now())]

    def lap(self, name: str) -> None:
        """End a lap here."""
        self.marks.append((name, self.now()))

    def now(self) -> Any:
        """This moment, of the device's own time."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def collect(self) -> dict[str, float]:
        """Seconds of all laps so far; waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            self.seconds[name] += before.elapsed_time(after) / 1000 if self.on_gpu else after - before
        self.marks = self.marks[-1:]
        return dict(self.seconds)

    def watch(self, optimizer: Optimizer) -> None:
        """Measure the step of the base optimizer separately from the acceleration."""
        base = getattr(optimizer, "base", optimizer)
        before = "base_step" if base is optimizer else "acceleration"
        base.register_step_pre_hook(lambda *_: self.lap(before))
        base.register_step_post_hook(lambda *_: self.lap("base_step"))


if __name__ == "__main__":
    sys.exit(main())
