"""Settings of the command line. The defaults are the paper's, if it gives them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..ranges import ABOVE_ZERO, Range, at_least

POSITIVE = ("batch_size", "image_size", "epochs", "checkpoint_every", "log_every", "period", "store_period")
NOT_NEGATIVE = ("workers", "warmup_epochs", "average_window", "seed")
FRACTIONAL = {
    "rate": ABOVE_ZERO,
    "weight_decay": at_least(0),
    "momentum": Range(lambda number: 0 <= number < 1, "0 and more, below 1"),
}


class BadSettings(ValueError):
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
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise BadSettings(f"Invalid {name}: {getattr(self, name)}. Allowed: 1 and more.")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise BadSettings(f"Invalid {name}: {getattr(self, name)}. Allowed: 0 and more.")
        for name, allowed in FRACTIONAL.items():
            if not allowed.holds(getattr(self, name)):
                raise BadSettings(f"Invalid {name}: {getattr(self, name)}. Allowed: {allowed.words}.")
        if self.limit_batches is not None and self.limit_batches < 1:
            raise BadSettings(f"Invalid limit_batches: {self.limit_batches}. Allowed: 1 and more.")
