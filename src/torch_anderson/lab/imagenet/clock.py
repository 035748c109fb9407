"""Time of training by phases; each ends where the next begins, so that nothing is left out.

On a GPU a phase ends with an event in the stream that is read later, so that training does not wait for it.

Phases of a step:

- data: waiting for images and taking them to the device;
- forward_backward: until the last gradients are ready (with FSDP2, including its collectives);
- communication: with DDP, from there until they are summed over the processes, which the backward pass does not hide;
- base_step: the step of the base optimizer and the scaling of gradients;
- acceleration: the rest of the optimizer's step, including the collectives of the acceleration.
"""

import time
from typing import Any

import torch
from torch.optim import Optimizer

LAPS = ("data", "forward_backward", "communication", "base_step", "acceleration")


class Clock:
    """Adds up laps by their names."""

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
