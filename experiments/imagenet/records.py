"""What a run is asked for and what it leaves: settings, a journal, and checkpoints."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ..ranges import ABOVE_ZERO, Range, at_least, check
from ..results import finite, write_json
from ..screen import UserError, tell

POSITIVE = ("batch_size", "image_size", "epochs", "checkpoint_every", "log_every", "period", "store_period")
ALLOWED = {
    **dict.fromkeys((*POSITIVE, "limit_batches"), at_least(1)),
    **dict.fromkeys(("workers", "warmup_epochs", "average_window", "seed", "weight_decay"), at_least(0)),
    "rate": ABOVE_ZERO,
    "momentum": Range(lambda number: 0 <= number < 1, "0 and more, below 1"),
}
FREE = {"data", "out", "workers", "epochs", "strategy", "checkpoint_every", "log_every"}
"""Settings that may change when a run is resumed."""


class BadSettings(UserError, ValueError):
    """Invalid settings; the message says what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train a residual network on a folder of images, on as many processes as torchrun starts.

    To resume from the last checkpoint, run the same command again.
    """

    data: Path
    """Folder with train/<class>/*.jpg and val/<class>/*.jpg."""
    out: Path = Path("results/imagenet")
    """Folder for metrics.jsonl, checkpoints, and the trained model.pt."""
    model: Literal["resnet50", "resnet20"] = "resnet50"
    """The network; resnet20 is for images of 32 pixels or so."""
    image_size: int = 224
    """Height and width of the network's input, in pixels."""
    epochs: int = 90
    """Passes over all training images."""
    batch_size: int = 64
    """Images per step on each process."""
    workers: int = 4
    """Processes that read images, for each that trains; 0: it reads them itself."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and their augmentation."""
    limit_batches: int | None = None
    """Largest number of steps per epoch and of batches per validation, for small runs."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Parameters on every process (DistributedDataParallel), or sharded over them (fully_shard)."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward pass (autocast); float16 with scaled gradients."""
    loss: Literal["ce", "bce"] = "ce"
    """Cross-entropy, or binary cross-entropy of each class against one-hot labels, as the paper writes it."""

    rate: float = 0.05
    """Learning rate of the warm-up; after it, times the square root of images per step, on all processes, over 64."""
    momentum: float = 0.9
    """Nesterov momentum."""
    weight_decay: float = 0.0
    """Weight decay; the paper mentions none."""
    warmup_epochs: int = 5
    """Epochs at that rate."""
    milestones: tuple[int, ...] = (30, 60, 80)
    """Epochs before which the learning rate is divided by 10."""

    method: Literal["base", "anderson", "average", "anderson+average"] = "base"
    """Nesterov alone, or with Anderson acceleration, the moving average, or both."""
    history_size: int = 20
    """m, largest number of columns of the history."""
    period: int = 5
    """p, steps between two accelerations."""
    store_period: int = 5
    """q, steps between two stored pairs."""
    relaxation: float = 0.5
    """β, how far to go towards the accelerated weights."""
    average_window: int = 4
    """Window of the methods with average. The paper does not give it; p - 1 is the longest between two jumps."""
    safeguard: Literal["residual", "none"] = "residual"
    """The paper's test of a jump, or none."""
    storage_shard: bool = False
    """With ddp: each process keeps only its share of the history."""
    storage_device: str | None = None
    """Device of the history, such as cpu; by default that of the parameters."""
    storage_dtype: Literal["bfloat16"] | None = None
    """Type of the history; by default that of the parameters."""

    checkpoint_every: int = 1000
    """Steps between two checkpoints, the most that is lost when a process is killed."""
    log_every: int = 50
    """Steps between two lines of progress."""

    def __post_init__(self) -> None:
        try:
            for name, allowed in ALLOWED.items():
                check(name, getattr(self, name), allowed)
        except ValueError as error:
            raise BadSettings(str(error)) from None


class Journal:
    """The files `settings.json` and `metrics.jsonl` of a run, and progress on the screen. Only rank 0 writes."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.path = settings, settings.out / "metrics.jsonl"
        self.speaks = dist.get_rank() == 0
        self.console = Console(stderr=True, quiet=not self.speaks)
        if self.speaks:
            self.check_settings(settings.out / "settings.json")

    def check_settings(self, path: Path) -> None:
        """Store the settings with the results; refuse to continue a run with other settings."""
        now = json.loads(json.dumps(asdict(self.settings), default=str))
        before = json.loads(path.read_text()) if path.exists() else now
        for name in before.keys() & now.keys() - FREE:
            if before[name] != now[name]:
                raise BadSettings(
                    f"Invalid {name}: {now[name]}. The run in {path.parent} was begun with {before[name]}: "
                    "give it again, or another --out."
                )
        write_json(path, now | {"processes": dist.get_world_size()})

    def resumed(self, position: dict[str, Any]) -> None:
        """Report where the run continues, and drop epochs that will be repeated."""
        tell(self.console, f"resumed in epoch {position['epoch']}, after step {position['step']}")
        if self.speaks and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["epoch"] < position["epoch"]]
            self.path.write_text("".join(kept))

    def step(self, epoch: int, step: int, steps: int, loss: Tensor) -> None:
        """Print a line of progress, if it is time; the loss is read only then, because a GPU would have to wait."""
        if self.speaks and (step % self.settings.log_every == 0 or step == steps):
            line = f"epoch {epoch}, step {step} of {steps}, loss {float(loss):.4g}"
            if self.console.is_terminal:
                self.console.print(line, end="\r", highlight=False)
            else:
                tell(self.console, line)

    def epoch(self, record: dict[str, Any]) -> None:
        """Write and print a line about an epoch."""
        if not self.speaks:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(finite(record)) + "\n")
        validation, corrupt = record["validation"], record["corrupt"] + record["validation"]["corrupt"]
        tell(
            self.console,
            f"epoch {record['epoch']}: loss {record['loss']:.4g}, top-1 {validation['top1']:.2%}, "
            f"top-5 {validation['top5']:.2%}, {record['images_per_second']:.0f} images/s"
            + (f", {corrupt:.0f} images could not be read" if corrupt else ""),
        )


class Checkpoints:
    """The checkpoints of one run, by torch.distributed.checkpoint: model, optimizer with its history, random state.

    ``common`` contains numbers that are equal on all processes, ``own`` numbers that differ between them. A checkpoint
    is written into a folder `step-<number>.part`, which loses its suffix when all processes are done: if one is killed
    before, the previous checkpoint is unchanged. Older ones are then removed.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    def save(self, step: int, common: dict[str, Any], own: dict[str, float]) -> None:
        """Write the checkpoint of a step, counted from the beginning of the run."""
        share_buffers(self.model)  # only one process's copy is saved
        final = self.folder / f"step-{step:09d}"
        if final.exists():
            return
        part = final.with_suffix(".part")
        save(self.state(common, own), checkpoint_id=part)
        if dist.get_rank() == 0:
            part.rename(final)
            for path in set(self.folder.glob("step-*")) - {final}:
                shutil.rmtree(path)

    def load(self, common: dict[str, Any], own: dict[str, float]) -> bool:
        """Load the latest checkpoint, also into these dictionaries; False if there is none."""
        path = self.latest()
        if path is None:
            return False
        state = self.state(common, own)
        known = FileSystemReader(path).read_metadata().state_dict_metadata
        if f"own.{dist.get_rank()}.random" not in known:  # there were fewer processes
            del state["own"]
        load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        common.update(state["common"])
        for mine in state.get("own", {}).values():
            random = mine.pop("random")
            length = len(torch.get_rng_state())
            torch.set_rng_state(random[:length])
            if torch.cuda.is_available() and len(random) > length:
                torch.cuda.set_rng_state(random[length:])
            own.update(mine)
        return True

    def latest(self) -> Path | None:
        """The newest checkpoint that is complete, as rank 0 sees it."""
        found: list[Path | None] = [None]
        if dist.get_rank() == 0 and self.folder.is_dir():
            for path in list(self.folder.glob("*.part")):
                shutil.rmtree(path)
            found = [max(self.folder.glob("step-*"), default=None)]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def state(self, common: dict[str, Any], own: dict[str, float]) -> dict[str, Any]:
        """The content of a checkpoint; the random states of CPU and GPU are one tensor."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        random = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
        mine = {str(dist.get_rank()): {"random": torch.cat(random), **own}}
        return {"model": model, "optimizer": optimizer, "common": common, "own": mine}


def share_buffers(model: nn.Module) -> None:
    """Give all processes rank 0's buffers: each one's BatchNorm has seen its own images."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
