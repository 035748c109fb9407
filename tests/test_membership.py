"""Which parameters take part, of what kind they are, and who else writes to them."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from training import (
    BASES,
    EAGER,
    GRADIENTS,
    assert_counters_add_up,
    assert_same,
    both,
    counts,
    eager,
    loss_of,
    make,
    make_model,
    train,
    weights,
)

from torch_anderson import Anderson, MovingAverage

KINDS = [
    {},
    {"safeguard": "residual"},
    {"safeguard": "gradient", "average": MovingAverage(2, tolerance=0.0)},
    {"average": MovingAverage(3, tolerance=0.0)},
    {"store_period": 2, "period": 4},
    GRADIENTS,
    {**GRADIENTS, "safeguard": None, "period": 2},
]
every_kind = pytest.mark.parametrize("options", KINDS, ids=str)
every_base = pytest.mark.parametrize("base", [base for base in BASES if base != "lbfgs"])


def taken_back(optimizer):
    return sum(counts(optimizer).get(f"rejected_{cause}", 0) for cause in ("residual", "gradient"))


def frozen(layer, yes=True):
    for p in layer.parameters():
        p.requires_grad_(not yes)
        p.grad = None


# ---------------------------------------------------------------------------------- coming and going


@every_base
@every_kind
def test_frozen_parameters_never_move(base, options):
    model, optimizer = make(base, **options)
    for start in range(0, 35, 7):  # in the middle of periods and windows
        layer = model[0] if start % 2 else model[2]
        frozen(layer)
        before = weights(layer)
        train(model, optimizer, start + 7, start=start)
        assert_same(weights(layer), before)
        frozen(layer, False)
    train(model, optimizer, 60, start=35)
    assert optimizer.stats.as_dict()["attempted"] > 0
    assert_counters_add_up(optimizer)


@every_base
@every_kind
def test_parameters_without_gradient_are_not_moved_by_a_jump(base, options):
    model, optimizer = make(base, **options)
    idle = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [idle]})
    train(model, optimizer, 20)
    assert optimizer.stats.as_dict()["attempted"] > 0
    assert_same([idle.detach()], [torch.ones(3)])


@every_kind
@pytest.mark.parametrize("alone", ["in its type", "in taking part"])
def test_a_parameter_on_its_own_is_not_moved_without_gradient_either(alone, options):
    """While others have gradients, the base leaves it alone, and has not consumed its gradient."""
    model = make_model()
    gate = nn.Parameter(torch.ones(8, dtype=torch.float64 if alone == "in its type" else torch.float32))
    groups = [{"params": model.parameters(), "anderson": alone == "in its type"}, {"params": [gate]}]
    optimizer = Anderson(SGD(groups, lr=0.1), **{**EAGER, **options})
    for i in range(40):
        optimizer.zero_grad()
        rejected = optimizer.stats.as_dict()["rejected_residual"]
        loss = loss_of(model, i)
        (loss if i % 5 == 4 else loss + (gate * torch.linspace(0.1, 1, 8)).square().sum()).backward()
        before = gate.detach().clone()
        optimizer.step()
        if gate.grad is None and optimizer.stats.as_dict()["rejected_residual"] == rejected:
            assert_same([gate.detach()], [before])
    assert optimizer.stats.as_dict()["attempted"] > 0 or options.get("residual") == "gradient"  # it may rest


@every_base
@every_kind
def test_parameters_used_now_and_then_move_only_when_the_base_moves_them(base, options):
    """As experts do in a mixture; the base is asked what it would move."""
    model = make_model()
    gates = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = Anderson(BASES[base]([*model.parameters(), *gates]), **eager(**options))
    for i in range(40):
        optimizer.zero_grad()
        used, unused = gates[i // 4 % 2], gates[1 - i // 4 % 2]
        rejected = taken_back(optimizer)
        (loss_of(model, i) + used.square().sum()).backward()
        before = unused.detach().clone()
        optimizer.step()
        if taken_back(optimizer) == rejected:  # else it returns to where it was
            assert_same([unused.detach()], [before])
    assert optimizer.stats.as_dict()["attempted"] > 0


@every_base
@pytest.mark.parametrize("saved_in_between", [True, False])
def test_a_jump_taken_back_leaves_nothing_behind(base, saved_in_between):
    """The next step is the base's own after its plain one, whichever parameters had a gradient in between."""

    def build():
        model, gates = make_model(), [nn.Parameter(torch.ones(n)) for n in (8, 8, 64)]
        return model, gates, BASES[base]([*model.parameters(), *gates])

    def step(model, gates, optimizer, i, scale, used):
        optimizer.zero_grad()
        (scale * (loss_of(model, i) + sum(gates[j].square().sum() for j in used))).backward()
        optimizer.step()

    (model, gates, inner), plain = build(), build()
    optimizer = Anderson(inner, **{**EAGER, "safeguard": "residual"})
    for i in range(3):
        step(model, gates, optimizer, i, 1.0, (0, 1))
        step(*plain, i, 1.0, (0, 1))
    step(model, gates, optimizer, 3, 1e3, (0, 2))  # a larger residual: the jump before it is taken back
    assert counts(optimizer) == {"attempted": 1, "rejected_residual": 1}
    assert_same([*weights(model), *gates], [*weights(plain[0]), *plain[1]])
    if saved_in_between:
        optimizer.state_dict()
    step(model, gates, optimizer, 4, 1.0, (0, 1, 2))
    step(*plain, 4, 1.0, (0, 1, 2))
    assert_same([*weights(model), *gates], [*weights(plain[0]), *plain[1]])
    assert base == "list_state" or "anderson_point_diffs" in optimizer.state[gates[2]]  # a checkpoint has it


@every_base
def test_a_jump_that_gradients_take_back_leaves_nothing_behind(base):
    """Shortened twice, then taken back: the weights are those of the plain step, the base has seen no gradient."""

    def build():
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3, 4))]
        return params, BASES[base](params)

    def step(params, optimizer, scale=1.0):
        optimizer.zero_grad()
        (scale * quadratic(params)).backward()
        optimizer.step()

    (params, inner), plain = build(), build()
    optimizer = Anderson(inner)
    for _ in range(4):
        step(params, optimizer)
        step(*plain)
    assert counts(optimizer) == {"attempted": 1}
    for attempt in (1, 2, 3):
        step(params, optimizer, scale=1e3)
        assert counts(optimizer)["rejected_gradient"] == attempt
    assert_same([p.detach() for p in params], [p.detach() for p in plain[0]])
    assert_counters_add_up(optimizer)
    with optimizer.disabled():
        step(params, optimizer)
    step(*plain)
    assert_same([p.detach() for p in params], [p.detach() for p in plain[0]])


@every_base
@every_kind
def test_a_group_added_in_mid_run_is_accelerated_too(base, options):
    model, optimizer = make(base, **options)
    train(model, optimizer, 8)
    late = nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(late.parameters())})
    for _ in range(40):  # one batch: gradients of changing ones are noise
        train(nn.Sequential(model, late), optimizer, 9, start=8)
    assert optimizer.stats.as_dict()["attempted"] > 0
    assert optimizer.stats.as_dict()["restarts"] > 0 or options["residual"] == "gradient"  # at rest it has no history
    assert "anderson_point_diffs" in optimizer.state_dict()["state"].get(4, {}) or base == "list_state"
    assert_counters_add_up(optimizer)


@every_kind
def test_a_group_that_opted_out_is_left_to_the_base(options):
    """The two halves do not interact: the half that opted out goes where the base alone takes it.

    A gradient that refuses a jump makes no base step, for none of the groups.
    """
    model, other, plain = make_model(0), make_model(1), make_model(1)
    groups = [{"params": list(model.parameters())}, {"params": list(other.parameters()), "anderson": False}]
    optimizer = Anderson(Adam(groups, lr=1e-2), **eager(**options))
    for _ in range(20):
        optimizer.zero_grad()
        (loss_of(model, 0) + loss_of(other, 0)).backward()
        optimizer.step()
    assert optimizer.stats.as_dict()["attempted"] > 0
    base = Adam(plain.parameters(), lr=1e-2)
    for _ in range(20 - optimizer.stats.counts["rejected_gradient"]):
        train(plain, base, 1)
    assert_same(weights(other), weights(plain))


# ---------------------------------------------------------------------------------- kinds of parameters


def quadratic(params):
    """A convex loss with a different curvature in each entry."""
    total = 0.0
    for p in params:
        if p.numel():
            scale = torch.linspace(0.5, 2.0, p.numel()).view(p.shape)
            total = total + (scale * (p - 1).abs().square()).sum()
    return total


PARAMETERS = {
    "bfloat16": lambda: torch.zeros(3, 2, dtype=torch.bfloat16),
    "float16": lambda: torch.zeros(3, 2, dtype=torch.float16),
    "float64": lambda: torch.zeros(3, 2, dtype=torch.float64),
    "complex64": lambda: torch.zeros(3, 2, dtype=torch.complex64),
    "complex128": lambda: torch.zeros(3, dtype=torch.complex128),
    "complex without dimensions": lambda: torch.zeros((), dtype=torch.complex64),
    "without dimensions": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 3),
    "channels_last": lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(3, 5).t(),
    "long": lambda: torch.zeros(1 << 17),
}


def quadratic_run(kind, base, options, steps=20):
    params = [nn.Parameter(PARAMETERS[kind]()), nn.Parameter(torch.zeros(2))]
    optimizer = base(params) if options is None else Anderson(base(params), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        quadratic(params).backward()
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("kind", PARAMETERS)
@every_kind
def test_every_kind_of_parameter_keeps_its_form_and_gets_nearer_than_the_base_takes_it(kind, options):
    def base(params):
        return SGD(params, lr=0.05)

    params, optimizer = quadratic_run(kind, base, eager(**options))
    plain, _ = quadratic_run(kind, base, None)
    for p, q in zip(params, plain, strict=True):
        assert (p.dtype, p.shape, p.stride()) == (q.dtype, q.shape, q.stride())
    if kind not in ("bfloat16", "float16"):  # there it is a matter of luck
        assert quadratic(params) < quadratic(plain)
    assert optimizer.stats.as_dict()["accepted"] > 0


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize(
    "base", [lambda p: SGD(p, lr=0.05, momentum=0.9), lambda p: Adam(p, lr=0.1)], ids=["sgd", "adam"]
)
@pytest.mark.parametrize("options", [{"safeguard": "residual", "average": MovingAverage(2)}, GRADIENTS], ids=str)
def test_every_kind_of_parameter_resumes_bit_for_bit(kind, base, options):
    options = eager(**options)
    expected, _ = quadratic_run(kind, base, options)
    params, optimizer = quadratic_run(kind, base, options, steps=7)
    again = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = Anderson(base(again), **options)
    resumed.load_state_dict(optimizer.state_dict())
    for _ in range(13):
        resumed.zero_grad()
        quadratic(again).backward()
        resumed.step()
    assert_same([p.detach() for p in again], [p.detach() for p in expected])


@both
def test_groups_of_different_precision_and_rate_are_accelerated_together(options):
    params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.02}]
    optimizer = Anderson(SGD(groups, lr=0.1), **options)
    for _ in range(20):
        optimizer.zero_grad()
        quadratic(params).backward()
        optimizer.step()
    assert optimizer.stats.as_dict()["accepted"] > 0
    assert quadratic(params) < 1e-2


@every_kind
def test_a_model_that_changes_its_precision_keeps_its_history(options):
    model, optimizer = make("sgd", **options)
    train(model, optimizer, 9)
    before = counts(optimizer)
    model.double()
    train(model, optimizer, 21, start=9)
    assert optimizer.stats.as_dict()["attempted"] > before["attempted"]
    assert "restarts" not in counts(optimizer)
    assert all(p.dtype is torch.float64 and p.isfinite().all() for p in model.parameters())


# ------------------------------------------------------------------------------------- outside writes


@pytest.mark.parametrize("write", ["copy", "load_state_dict"])
@pytest.mark.parametrize(
    "options, first",
    [({"safeguard": "residual"}, 3), ({"safeguard": "gradient"}, 3), ({**GRADIENTS, "period": 4}, 4)],
    ids=str,
)
def test_other_weights_that_are_loaded_stay_although_a_jump_is_pending(write, options, first):
    model, optimizer = make("sgd", **options)
    train(model, optimizer, first)
    assert counts(optimizer) == {"attempted": 1}
    other = make_model(1)
    if write == "copy":
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.copy_(q)
    else:
        model.load_state_dict(other.state_dict())
    train(model, optimizer, first + 1, start=first)
    train(other, SGD(other.parameters(), lr=0.1), first + 1, start=first)
    assert_same(weights(model), weights(other))
    assert counts(optimizer) == {"attempted": 1, "rejected_outside_write": 1, "restarts": 1}


def test_a_write_from_outside_empties_the_averaging_window():
    model, optimizer = make("sgd", average=MovingAverage(3, tolerance=0.0), period=100)
    train(model, optimizer, 5)
    other = make_model(1)
    model.load_state_dict(other.state_dict())
    train(model, optimizer, 2)
    train(other, SGD(other.parameters(), lr=0.1), 2)
    assert_same(weights(model), weights(other))


def test_learning_rates_that_change_their_ratio_take_a_pending_jump_back():
    """Gradients of before and after cannot be compared: nothing can decide on it."""
    model, without = make_model(), make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = Anderson(SGD(groups, lr=0.1))
    train(model, optimizer, 4)
    assert counts(optimizer) == {"attempted": 1}
    optimizer.param_groups[0]["lr"] = 0.05
    train(model, optimizer, 5, start=4)
    train(without, SGD(without.parameters(), lr=0.1), 4)
    assert_same(weights(model), weights(without))
    assert counts(optimizer) == {"attempted": 1, "rejected_gradient": 1, "restarts": 1}


@both
def test_a_reset_history_is_an_empty_one(options):
    (model, optimizer), (other, fresh) = make("sgd", **options), make("sgd", **options)
    train(model, optimizer, 6)
    optimizer.reset_history()
    other.load_state_dict(model.state_dict())
    train(model, optimizer, 20, start=6)
    train(other, fresh, 20, start=6)
    assert_same(weights(model), weights(other))
