"""The training loop: epochs of steps, validation after each, checkpoints between."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional

from torch_anderson import Anderson

from .. import resnet
from . import parallel
from .augmentation import normalised
from .batches import Order, Share, loader
from .checkpoints import Checkpoints
from .clock import Clock
from .images import Images
from .journal import Journal
from .methods import make_optimizer
from .schedule import rate_at
from .settings import Settings
from .validation import validate


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
        self.prepare_data()
        self.model = self.make_model()
        self.optimizer = make_optimizer(settings, self.model.parameters())
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "float16")
        self.clock.watch(self.optimizer)
        self.checkpoints = Checkpoints(settings.out / "checkpoints", self.model, self.optimizer)
        self.begin_epoch()

    def prepare_data(self) -> None:
        """Find the images and distribute them over the processes."""
        settings, rank, world = self.settings, dist.get_rank(), dist.get_world_size()
        size, batch, limit = settings.image_size, settings.batch_size, settings.limit_batches
        images = Images(settings.data, "train", size, settings.seed, augment=True)
        unseen = Images(settings.data, "val", size, settings.seed, augment=False)
        self.classes = len(images.classes)
        self.order = Order(len(images), batch, rank, world, settings.seed, limit)
        self.batches = loader(images, self.order, settings)
        self.unseen = loader(unseen, Share(len(unseen), batch, rank, world, limit), settings)

    def make_model(self) -> nn.Module:
        """The network over all processes, with the weights of the seed."""
        torch.manual_seed(self.settings.seed)
        make = resnet.resnet50 if self.settings.model == "resnet50" else resnet.small_resnet
        model = parallel.spread(make(self.classes).to(self.device), self.settings.strategy, self.clock)
        size = self.settings.image_size
        parallel.settle_buckets(model, torch.zeros(2, 3, size, size, device=self.device))
        return model

    # ------------------------------------------------------------------------------------------------ the loop

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

    # ------------------------------------------------------------------------------------------ what is kept

    def record(self) -> dict[str, Any]:
        """The numbers of an epoch, over all processes; seconds are their mean."""
        world = dist.get_world_size()
        counts = parallel.summed(self.counts(), self.device)
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
