"""The library and the textbook twin side by side: the same weights after every step, for the same reasons.

The library solves normal equations, the twin uses an SVD of the columns: where columns are nearly collinear and
nothing is regularised they may differ by conditioning alone. So the problems here have a regularization of 1e-4, at
which normal equations are accurate to about 1e-12.

Accelerated training can amplify rounding errors from step to step. A second twin, whose start differs from the
first's by the rounding errors of a few dozen operations, shows when: from there on nothing is compared.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from reference import TextbookAnderson
from torch import Tensor, optim

from torch_anderson import Anderson as AnyAnderson
from torch_anderson import MovingAverage
from torch_anderson._anderson.step import MOST_GAIN

STEPS = 30
TOLERANCE = 1e-8
ROUNDING = 1e-14
CHAOS = 1e-11
"""A third run, the twin from weights that differ by ROUNDING, shows how rounding is amplified: where by more than 1e3,
nothing can be compared. The library solves normal equations, whose solution has about 1e-12 at regularization 1e-4, and
the same amplification makes 1e-9 of that: a tenth of the tolerance."""
Schedule = Callable[[int], float]
Anderson = partial(AnyAnderson, residual="step")


def constant(step: int) -> float:
    return 1.0


def staircase(step: int) -> float:
    return 0.5 ** (step // 9)


def wave(step: int) -> float:
    return 1 + 0.5 * math.sin(step)


def with_pauses(step: int) -> float:
    return 0.0 if step % 7 == 3 else 1.0


@dataclass
class Setting:
    """A base, its learning rates over time, the noise of its gradients, and options for both sides."""

    base: Callable[..., optim.Optimizer]
    rates: tuple[float, float] = (0.1, 0.1)
    schedule: Schedule = constant
    noise: float = 0.0
    options: dict = field(default_factory=dict)
    opted_out: bool = False
    one_group: bool = False
    zero_gradients: tuple[int, ...] = ()
    seed: int = 0


class Training:
    """A robust regression in two parameter groups; the same start, data and noise for every instance of a setting."""

    def __init__(self, setting: Setting) -> None:
        generator = torch.Generator().manual_seed(setting.seed)
        randn = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.setting = setting
        self.inputs, self.targets = randn(40, 16) * torch.logspace(0, -0.5, 16, dtype=torch.float64), randn(40)
        self.params = [randn(3, 4).requires_grad_(), randn(4).requires_grad_()]
        self.noise = setting.noise * randn(STEPS, 16)
        groups = [{"params": [p], "lr": lr} for p, lr in zip(self.params, setting.rates, strict=True)]
        if setting.opted_out:
            self.params += [randn(5).requires_grad_()]
            groups += [{"params": self.params[2:], "lr": setting.rates[0], "anderson": False}]
        self.base = setting.base(self.params if setting.one_group else groups, lr=setting.rates[0])
        self.initial_rates = [group["lr"] for group in self.base.param_groups]

    def loss(self, step: int) -> Tensor:
        a, b, *others = self.params
        x = torch.cat([a.flatten(), b])
        error = self.inputs @ x - self.targets
        return (
            (1 + error**2).sqrt().mean() + 0.01 * x @ x + self.noise[step] @ x + sum(torch.cos(c).sum() for c in others)
        )

    def closure(self, step: int) -> Tensor:
        for param in self.params:
            param.grad = None
        loss = self.loss(step)
        loss.backward()
        if step in self.setting.zero_gradients:
            for param in self.params:
                param.grad.zero_()
        return loss.detach()

    def step(self, optimizer: AnyAnderson | TextbookAnderson, step: int) -> None:
        for group, lr in zip(self.base.param_groups, self.initial_rates, strict=True):
            group["lr"] = lr * self.setting.schedule(step)
        optimizer.step(partial(self.closure, step), loss_fn=partial(self.loss, step))


def run(setting: Setting) -> tuple[int, set[str]]:
    """Compare both sides; the number of steps until rounding decides, and what became of the accelerations."""
    options = {"regularization": 1e-4, "max_jump": 2.0, **setting.options}
    ours, textbook, disturbed = Training(setting), Training(setting), Training(setting)
    with torch.no_grad():
        disturbed.params[0].mul_(1 + ROUNDING)
    library = Anderson(ours.base, **options)
    twin, other_twin = (TextbookAnderson(t.base, **options, max_gain=MOST_GAIN) for t in (textbook, disturbed))
    causes: list[str] = []
    library.register_acceleration_hook(lambda record: causes.append(record.cause or "accepted"))
    for step in range(STEPS):
        ours.step(library, step)
        textbook.step(twin, step)
        disturbed.step(other_twin, step)
        converged = twin.pairs and twin.pairs[-1].rn.norm() < CHAOS  # residuals are rounding errors
        if converged or distance(textbook, disturbed) > CHAOS:
            return step, set(causes)
        where = f"step {step + 1}, twin: {twin.last}, library: {library.stats.latest}, {setting}"
        assert distance(ours, textbook) <= TOLERANCE, where
        if causes and twin.last and twin.pending is None:
            assert causes[-1] == twin.last["cause"], where
    return STEPS, set(causes)


def distance(one: Training, other: Training) -> float:
    """The largest difference of weights, relative to the largest weight where that is above 1."""
    x, y = (torch.cat([param.detach().flatten() for param in training.params]) for training in (one, other))
    return ((x - y).abs().max() / x.abs().max().clamp_min(1.0)).item()


SGD = partial(optim.SGD, momentum=0.0)
MOMENTUM = partial(optim.SGD, momentum=0.9)
NESTEROV = partial(optim.SGD, momentum=0.9, nesterov=True)
LBFGS = partial(optim.LBFGS, max_iter=2, history_size=3)

BASES = {
    "SGD": Setting(SGD),
    "momentum": Setting(MOMENTUM, (0.02, 0.02)),
    "Nesterov, weight decay": Setting(partial(NESTEROV, weight_decay=0.3), (0.02, 0.02)),
    "Adam": Setting(optim.Adam, (0.02, 0.02)),
    "AdamW, two rates, staircase": Setting(optim.AdamW, (0.03, 0.01), staircase),
    "SGD, two rates, wave": Setting(SGD, (0.2, 0.05), wave),
    "SGD, one rate 0": Setting(SGD, (0.1, 0.0), wave),
    "Rprop": Setting(optim.Rprop, (0.01, 0.01)),
    "Rprop, staircase": Setting(optim.Rprop, (0.02, 0.01), staircase),
    "LBFGS": Setting(LBFGS, (0.02, 0.02), one_group=True),
    "LBFGS, staircase": Setting(LBFGS, (0.04, 0.04), staircase, one_group=True),
}
MODES = {
    "every step": {"period": 1, "history_size": 5, "safeguard": None},
    "period 5": {"period": 5, "history_size": 5, "safeguard": None},
    "store period 2, period 5": {"period": 5, "store_period": 2, "history_size": 4, "safeguard": None},
    "store period 3, period 4, warmup 5": {"period": 4, "store_period": 3, "warmup": 5},
    "relaxed": {"period": 3, "relaxation": 0.4, "safeguard": None},
    "one column": {"period": 2, "history_size": 1, "safeguard": None},
    "average": {"period": 5, "average": MovingAverage(4), "safeguard": None},
    "average at every step": {"period": 1, "average": MovingAverage(3), "safeguard": None},
    "residual safeguard": {"period": 3, "safeguard": "residual"},
    "residual safeguard, average": {"period": 3, "safeguard": "residual", "average": MovingAverage(2)},
    "loss safeguard": {"period": 3, "safeguard": "loss"},
    "residual safeguard at every step, relaxed": {"history_size": 3, "relaxation": 0.8, "safeguard": "residual"},
    "gradient safeguard": {"period": 3, "safeguard": "gradient"},
    "gradient safeguard, average": {"period": 3, "average": MovingAverage(2)},
    "gradient safeguard at every step, average": {"history_size": 3, "average": MovingAverage(3, tolerance=0.0)},
    "gradient safeguard at every step, relaxed": {"history_size": 3, "relaxation": 0.8},
    "short jumps": {"period": 3, "max_jump": 0.4, "safeguard": None},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("base", BASES)
def test_weights_follow_the_twins_path(base, mode):
    compared, causes = run(Setting(**{**vars(BASES[base]), "noise": 0.05, "options": MODES[mode]}))
    assert compared >= 20
    plain = base.startswith("LBFGS") and MODES[mode].get("safeguard", "gradient") == "gradient"
    assert plain != bool(causes)


def random_setting(seed: int) -> Setting:
    """Any combination of options that is allowed, without gradient noise or with some."""
    rng = random.Random(seed)
    setting = Setting(**{**vars(rng.choice(list(BASES.values()))), "seed": seed})
    setting.noise = rng.choice([0.0, 0.02, 0.2])
    setting.options = {
        "period": rng.randint(1, 6),
        "history_size": rng.randint(1, 6),
        "relaxation": rng.choice([1.0, 0.7, 0.2]),
        "warmup": rng.choice([0, 0, 1, 4]),
        "max_jump": rng.choice([0.5, 2.0, math.inf]),
        "safeguard": rng.choice([None, "loss", "residual", "gradient"]),
    }
    options = setting.options
    options["store_period"] = rng.randint(1, 4)
    window, tolerance = rng.choice([0, 0, 1, 2, 4, 6]), rng.choice([0.1, 1.0])
    options["average"] = MovingAverage(window, tolerance=tolerance) if window else None
    setting.opted_out = not setting.one_group
    return setting


@pytest.mark.parametrize("seed", range(80))
def test_any_combination_of_options_follows_the_twins_path(seed):
    compared, _ = run(random_setting(seed))
    assert compared >= 8


def test_random_settings_reach_every_outcome():
    seen = set().union(*(run(random_setting(seed))[1] for seed in range(0, 80, 4)))
    assert seen >= {"accepted", "no_gain", "too_long", "loss", "residual", "gradient"}


# Steps that do nothing, and weights that take no part

IDLE_MODES = [
    *("store period 2, period 5", "every step", "average", "residual safeguard"),
    *("gradient safeguard", "gradient safeguard, average"),
]


@pytest.mark.parametrize("mode", IDLE_MODES)
def test_step_at_learning_rate_0_leaves_what_is_under_way(mode):
    run(Setting(SGD, (0.2, 0.05), with_pauses, noise=0.05, options=MODES[mode]))


@pytest.mark.parametrize("mode", IDLE_MODES)
def test_step_with_zero_gradients_leaves_what_is_under_way(mode):
    run(Setting(SGD, noise=0.05, options=MODES[mode], zero_gradients=(4, 13, 18)))


@pytest.mark.parametrize(
    "mode",
    ["period 5", "average", "residual safeguard"],
)
@pytest.mark.parametrize("base", [MOMENTUM, optim.Adam])
def test_opted_out_group_trains_as_with_the_base_alone(base, mode):
    setting = Setting(base, (0.02, 0.02), wave, noise=0.2, options=MODES[mode], opted_out=True)
    ours, alone = Training(setting), Training(setting)
    optimizer = Anderson(ours.base, **setting.options)
    for step in range(STEPS):
        ours.step(optimizer, step)
        for group, lr in zip(alone.base.param_groups, alone.initial_rates, strict=True):
            group["lr"] = lr * wave(step)
        alone.base.step(partial(alone.closure, step))
        assert torch.equal(ours.params[2], alone.params[2])


def test_rejected_jump_is_taken_back_where_the_next_gradient_is_absent():
    # Steps of 1 and 1/2 at 0 and 1 make the jump to 2; a longer step after it takes both weights back to 3/2.
    first, second = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = Anderson(optim.SGD([first, second], lr=1.0), period=2, safeguard="residual", regularization=0.0)
    for gradients in ((-1.0, -1.0), (-0.5, -0.5), (-3.0, None)):
        for param, gradient in zip((first, second), gradients, strict=True):
            param.grad = None if gradient is None else torch.full_like(param, gradient)
        optimizer.step()
    assert optimizer.stats.latest.cause == "residual"
    assert first.item() == pytest.approx(1.5)
    assert second.item() == pytest.approx(1.5)


def test_jump_leaves_a_parameter_without_gradient():
    first, second = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = Anderson(optim.SGD([first, second], lr=1.0), period=3, safeguard=None)
    for gradients in ((-1.0, -1.0), (-0.5, -0.5), (-0.2, None)):
        for param, gradient in zip((first, second), gradients, strict=True):
            param.grad = None if gradient is None else torch.full_like(param, gradient)
        optimizer.step()
    assert optimizer.stats.latest.cause == ""
    assert second.item() == 1.5
