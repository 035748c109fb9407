"""What is trained in every layout: each makes 20 accelerations or more, and a good part of them is accepted.

The regularization keeps the small problems well conditioned. With next to none, as by default, training itself turns a
change of the last digit into one of 1e-7 within 200 steps, in a single process: nothing could be compared at 1e-12.
"""

from typing import Any

import torch
from layouts import Case, Elementwise, Training, constant, diverging, staircase, wave

from torch_anderson import MovingAverage

SGD, MOMENTUM, ADAM = ("sgd", (0.3, 0.4)), ("momentum", (0.05, 0.07)), ("adam", (0.01, 0.02))
TAME = {"residual": "step", "max_jump": 20.0, "regularization": 1e-2}
ANY = {"safeguard": None, **TAME}
"""Whatever jump there is, if it is not too long."""


def case(base, schedule, steps, *options: dict[str, Any]) -> Case:
    """A case with several sets of options."""
    return Case(*base, schedule, steps, {name: value for part in options for name, value in part.items()})


NETWORK = {
    "p = q = 1": case(SGD, constant, 22, {"period": 1, "history_size": 2}, ANY, {"regularization": 0.1}),
    "loss": case(SGD, constant, 44, {"period": 2, "history_size": 2}, TAME, {"safeguard": "loss"}),
    "residual": case(
        *(("momentum", (0.1, 0.12)), constant, 54, {"period": 2, "history_size": 2}, TAME, {"safeguard": "residual"})
    ),
}
"""Real forward and backward passes; few, as these take nearly all the time."""

MORE_NETWORK = {
    "loss, Adam": case(ADAM, constant, 44, {"period": 2, "history_size": 2}, TAME, {"safeguard": "loss"}),
    "loss, a part of the way": case(
        *(SGD, staircase, 48, {"period": 2, "relaxation": 0.6, "history_size": 3}, TAME, {"safeguard": "loss"})
    ),
}

ELEMENTWISE = {
    "p = q = 1, averaged": case(
        *(SGD, wave, 35, {"period": 1, "history_size": 3, "average": MovingAverage(3), "relaxation": 0.5}, ANY)
    ),
    "p = q = 5, Adam": case(
        *(("adam", (0.02, 0.03)), wave, 110, {"period": 5, "store_period": 5, "history_size": 2}, ANY)
    ),
    "p = 5, q = 2, momentum": case(
        *(MOMENTUM, staircase, 115, {"period": 5, "store_period": 2, "history_size": 2, "relaxation": 0.5}, ANY)
    ),
    "p = 10, q = 1, momentum": case(MOMENTUM, constant, 210, {"period": 10, "history_size": 4}, ANY),
    "short jumps": case(SGD, wave, 66, {"period": 3, "history_size": 3}, ANY, {"max_jump": 1.0}),
    "average": case(SGD, staircase, 65, {"period": 3, "average": MovingAverage(2), "history_size": 2}, ANY),
    "averages over momentum": case(
        *(MOMENTUM, constant, 75, {"period": 3, "average": MovingAverage(3, tolerance=0.5), "history_size": 2}, ANY)
    ),
    "residual, averaged": case(
        *(SGD, wave, 85, {"period": 3, "average": MovingAverage(2), "history_size": 3}, TAME, {"safeguard": "residual"})
    ),
    "half of the way, Adam": case(
        *(ADAM, staircase, 69, {"period": 3, "history_size": 2, "relaxation": 0.5}, ANY, {"regularization": 0.1})
    ),
    "residual, Adam": case(ADAM, constant, 69, {"period": 3, "history_size": 2}, TAME, {"safeguard": "residual"}),
    "ratios that change": case(SGD, diverging, 66, {"period": 3, "history_size": 3}, ANY),
}

GRADIENTS = {
    "gradients": case(("sgd", (0.3, 0.3)), constant, 24, {"history_size": 4}),
    "gradients, two rates": case(("sgd", (0.2, 0.3)), staircase, 30, {"history_size": 4}),
    "gradients, any jump": case(("sgd", (0.3, 0.3)), constant, 14, {"history_size": 2, "safeguard": None}),
    "gradients, Adam": case(ADAM, constant, 18, {"history_size": 3}),
    "gradients, ratios that change": case(SGD, diverging, 34, {"history_size": 3}),
}
"""Few steps: jumps follow upon each other, and amplify rounding."""

CASES = NETWORK | MORE_NETWORK | ELEMENTWISE | GRADIENTS


def build(name: str, layout: str = "single", **options: Any) -> Training:
    """A case, ready to train."""
    kind = Elementwise if name in ELEMENTWISE | GRADIENTS else Training
    return kind(CASES[name], layout, **options)


def disturbed(name: str) -> Training:
    """In a single process, from a start whose last digits are others."""
    training = build(name)
    with torch.no_grad():
        for seed, p in enumerate(training.net.parameters()):
            digits = torch.randint(-1, 2, p.shape, generator=torch.Generator().manual_seed(seed))
            p.mul_(1 + 2.3e-16 * digits.double())
    return training
