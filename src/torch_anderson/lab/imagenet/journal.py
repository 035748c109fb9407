"""Records of a run: a line of JSON per epoch in a file, and progress on the screen. Only rank 0 writes."""

import json
import math
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from rich.console import Console

from ..screen import tell
from .settings import BadSettings, Settings

FREE = {"data", "out", "workers", "epochs", "strategy", "checkpoint_every", "log_every"}
"""Settings that may change when a run is resumed."""


class Journal:
    """The files `settings.json` and `metrics.jsonl` of a run, and the console."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.speaks = dist.get_rank() == 0
        self.console = Console(stderr=True, quiet=not self.speaks)
        self.path = settings.out / "metrics.jsonl"
        if self.speaks:
            self.check_settings()

    def check_settings(self) -> None:
        """Store the settings with the results; refuse to continue a run with other settings."""
        path = self.settings.out / "settings.json"
        now = json.loads(json.dumps(asdict(self.settings), default=str))
        before = json.loads(path.read_text()) if path.exists() else now
        for name in before.keys() & now.keys() - FREE:
            if before[name] != now[name]:
                raise BadSettings(
                    f"Invalid {name}: {now[name]}. The run in {self.settings.out} was begun with {before[name]}: "
                    "give it again, or another --out."
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now | {"processes": dist.get_world_size()}, indent=1))

    def resumed(self, position: dict[str, Any]) -> None:
        """Report where the run continues, and drop epochs that will be repeated."""
        tell(self.console, f"resumed in epoch {position['epoch']}, after step {position['step']}")
        if self.speaks and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["epoch"] < position["epoch"]]
            self.path.write_text("".join(kept))

    def step(self, epoch: int, step: int, steps: int, loss: Any) -> None:
        """A line of progress, now and then; the loss is read then only, because a GPU would have to wait."""
        if self.speaks and (step % self.settings.log_every == 0 or step == steps):
            line = f"epoch {epoch}, step {step} of {steps}, loss {float(loss):.4g}"
            if self.console.is_terminal:
                self.console.print(line, end="\r", highlight=False)
            else:
                tell(self.console, line)

    def epoch(self, record: dict[str, Any]) -> None:
        """Write a line about an epoch."""
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


def finite(value: Any) -> Any:
    """A record as JSON can hold it: None for what is not a finite number.

    >>> finite({"loss": float("nan"), "top1": 0.5})
    {'loss': None, 'top1': 0.5}
    """
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
