"""What users get wrong, and numbers that go wrong: a clear error or a plain step, never damage."""

import math
import re
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
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

NAN = float("nan")
WRONG_OPTIONS = [
    *((name, value) for name in ("history_size", "period", "store_period") for value in (0, -1, 1.0, True, "3", None)),
    *(("warmup", value) for value in (-1, 0.5, False, None)),
    *(("relaxation", value) for value in (0, -0.5, 1.5, NAN, "1", None, True)),
    *(("regularization", value) for value in (-1e-9, NAN, math.inf, "small", True, None)),
    *(("max_jump", value) for value in (0, -1.0, NAN, None)),
    *(
        (name, value)
        for name in ("residual", "safeguard", "average", "storage", "process_group")
        for value in ("other", ["step"])
    ),
]
WRONG_AVERAGES = [
    *(("window", {"window": value}) for value in (0, -1, 1.5, True, None)),
    *(("tolerance", {"window": 3, "tolerance": value}) for value in (-1e-3, NAN, None)),
]
WRONG_TOGETHER = [
    ("safeguard", {"residual": "gradient", "safeguard": "residual"}),
    ("safeguard", {"safeguard": "loss"}),
    ("store_period", {"store_period": 2}),
    ("relaxation", {"relaxation": 0.5}),
    ("average", {"average": MovingAverage(3)}),
    ("regularization", {"regularization": 1e-6}),
    ("max_jump", {"max_jump": 2.0}),
]


def refusal(option, value):
    return rf"^Invalid {option}: {re.escape(repr(value))}\. Allowed: .+"


# --------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("option, value", WRONG_OPTIONS, ids=str)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(option, value):
    base = SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=refusal(option, value)):
        Anderson(base, **{"residual": "step", option: value})


@pytest.mark.parametrize("option, options", WRONG_TOGETHER, ids=str)
def test_options_that_exclude_each_other_are_refused(option, options):
    base = SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=refusal(option, options[option])):
        Anderson(base, **options)


@pytest.mark.parametrize("option, arguments", WRONG_AVERAGES, ids=str)
def test_a_wrong_setting_of_the_average_is_named_with_its_value_and_what_is_allowed(option, arguments):
    with pytest.raises(ValueError, match=refusal(option, arguments[option])):
        MovingAverage(**arguments)


def test_numbers_may_come_as_numpy_scalars_and_tensors():
    numbers = {"history_size": np.int64(3), "period": torch.tensor(4), "relaxation": np.float32(0.5), "max_jump": 3}
    plain = {"history_size": 3, "period": 4, "relaxation": 0.5, "max_jump": 3.0}
    found, expected = (
        Anderson(SGD(make_model().parameters(), lr=0.1), residual="step", **options).options
        for options in (numbers, plain)
    )
    assert found == expected
    assert MovingAverage(np.int32(3), tolerance=np.float64(0.2)) == MovingAverage(3, tolerance=0.2)


@pytest.mark.parametrize("arguments", [(3,), (3, 5)])
def test_options_by_position_are_refused(arguments):
    with pytest.raises(TypeError):
        Anderson(SGD(make_model().parameters(), lr=0.1), *arguments)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="histroy_size"):
        Anderson(SGD(make_model().parameters(), lr=0.1), histroy_size=3)


# ------------------------------------------------------------------------------------- bases, parameters


@pytest.mark.parametrize("base", [None, 3, SGD, [], make_model()], ids=lambda base: type(base).__name__)
def test_what_is_no_optimizer_is_refused(base):
    with pytest.raises(TypeError, match=r"Invalid base: .* Allowed: an instance of torch.optim.Optimizer"):
        Anderson(base)


def test_an_accelerated_base_is_refused():
    with pytest.raises(ValueError, match="accelerated already"):
        Anderson(Anderson(SGD(make_model().parameters(), lr=0.1)))


@pytest.mark.parametrize("kind", ["frozen", "opted out", "empty"])
@both
def test_a_base_without_parameters_to_accelerate_makes_plain_steps(kind, options):
    param = nn.Parameter(torch.ones(0 if kind == "empty" else 3), requires_grad=kind != "frozen")
    group = {"params": [param]} | ({"anderson": False} if kind == "opted out" else {})
    optimizer = Anderson(SGD([group], lr=0.1), **options)
    for _ in range(12):
        param.grad = torch.ones_like(param) if kind == "opted out" else None
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(param.detach(), torch.full_like(param, -0.2 if kind == "opted out" else 1.0))
    assert counts(optimizer).keys() <= {"skipped_short_history"}


@both
def test_parameters_that_are_all_frozen_at_first_are_accelerated_once_they_train(options):
    model = make_model().requires_grad_(False)
    optimizer = Anderson(SGD(model.parameters(), lr=0.1), **options)
    for _ in range(5):
        optimizer.step()
    model.requires_grad_(True)
    train(model, optimizer, 12)
    assert optimizer.stats.as_dict()["accepted"] > 0


def test_parameters_that_are_not_dense_are_refused():
    holes = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ValueError, match=r"shape \(4, 3\).*not dense"):
        Anderson(SGD([holes], lr=0.1))


@both
def test_a_group_that_is_refused_is_not_added(options):
    model, optimizer = make("sgd", **options)
    holes = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ValueError, match="not dense"):
        optimizer.add_param_group({"params": [holes]})
    train(model, optimizer, 6)
    assert len(optimizer.param_groups) == 1


def test_sparse_adam_is_refused():
    with pytest.raises(ValueError, match="SparseAdam"):
        Anderson(torch.optim.SparseAdam(make_model().parameters()))


@pytest.mark.parametrize("options", [{}, EAGER, EAGER | {"store_period": 5, "period": 10}], ids=str)
@pytest.mark.parametrize("base", [SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_refused_before_anything_moves(base, options):
    table = nn.Embedding(5, 3, sparse=True)
    before = weights(table)
    optimizer = Anderson(base(table.parameters(), lr=0.1), **options)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"[Ss]parse gradients"):
        optimizer.step()
    assert_same(weights(table), before)


@both
def test_sparse_gradients_of_a_group_that_opted_out_are_welcome(options):
    table, model = nn.Embedding(5, 4, sparse=True), make_model()
    groups = [{"params": table.parameters(), "anderson": False}, {"params": model.parameters()}]
    optimizer = Anderson(SGD(groups, lr=0.1), **options)
    for _ in range(9):
        optimizer.zero_grad()
        model(table(torch.tensor([1, 2]))).square().mean().backward()
        optimizer.step()
    assert optimizer.stats.as_dict()["attempted"] > 0


# ------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    "saved, named",
    [
        ({"history_size": 5}, "history_size"),
        ({"average": MovingAverage(2)}, "average"),
        ({"average": None}, "average"),
        ({"average": None, "residual": "gradient"}, "another accelerator"),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_options_is_refused_and_nothing_changes(saved, named):
    model, optimizer = make("momentum", average=MovingAverage(3))
    other, source = make("momentum", **{"average": MovingAverage(3), **saved})
    train(other, source, 7)
    assert_refused_without_damage(model, optimizer, source.state_dict(), named)


@pytest.mark.parametrize(
    "saved, named", [({"history_size": 5}, "history_size"), (EAGER, "another accelerator")], ids=["size", "step"]
)
def test_a_checkpoint_of_other_options_than_the_defaults_is_refused_and_nothing_changes(saved, named):
    model, optimizer = make("momentum", **GRADIENTS)
    other, source = make("momentum", **{**GRADIENTS, **saved})
    train(other, source, 7)
    assert_refused_without_damage(model, optimizer, source.state_dict(), named)


@both
def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(options):
    model, optimizer = make("momentum", **options)
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
    source = Anderson(BASES["momentum"](other.parameters()), **eager(**options))
    train(other, source, 7)
    assert_refused_without_damage(model, optimizer, source.state_dict(), r"another model.*\(9, 4\).*\(8, 4\)")


@both
def test_a_checkpoint_with_more_or_fewer_parameters_is_refused_and_nothing_changes(options):
    for layers in (1, 3):
        model, optimizer = make("momentum", **options)
        other = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        source = Anderson(BASES["momentum"](other.parameters()), **eager(**options))
        train(other, source, 7)
        assert_refused_without_damage(model, optimizer, source.state_dict(), None)


def assert_refused_without_damage(model, optimizer, state_dict, match):
    twin = make_model()
    undisturbed = Anderson(BASES["momentum"](twin.parameters()), **vars(optimizer.options))
    train(model, optimizer, 5)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(state_dict)
    train(model, optimizer, 15, start=5)
    train(twin, undisturbed, 15)
    assert_same(weights(model), weights(twin))
    assert counts(optimizer) == counts(undisturbed)


# ---------------------------------------------------------------------------------- numbers gone wrong

KINDS = [
    {},
    {"average": MovingAverage(3)},
    {"period": 1, "history_size": 2},
    {"safeguard": "residual"},
    {"safeguard": "loss"},
    {"residual": "gradient"},
    {"residual": "gradient", "safeguard": None, "period": 2},
]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("base", ["momentum", "adamw_foreach", "adamw_fused", "adagrad"])
def test_gradients_gone_wrong_never_crash_and_are_counted(base, options, bad):
    model, optimizer = make(base, **options)
    for i in range(14):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        if i == 7:
            model[0].weight.grad[0, 0] = bad
        optimizer.step(loss_fn=lambda i=i: loss_of(model, i))
    assert_counters_add_up(optimizer)
    if options.get("safeguard") != "residual" and not all(p.isfinite().all() for p in model.parameters()):
        noticed = "restarts" if options.get("residual") == "gradient" else "skipped_nonfinite"
        assert optimizer.stats.as_dict()[noticed] > 0


@pytest.mark.parametrize("base", ["sgd", "momentum"])
@pytest.mark.parametrize("options", KINDS[:3] + KINDS[5:], ids=str)
def test_weights_gone_wrong_end_where_the_base_ends(base, options):
    model, optimizer = make(base, **options)
    train(model, optimizer, 7)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(NAN)
    train(model, optimizer, 14)
    assert all(p.isnan().all() for p in model.parameters())
    assert optimizer.stats.as_dict()["restarts"] > 0


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_it_accelerates_again_once_weights_are_restored(options):
    model, optimizer = make("sgd", **options)
    train(model, optimizer, 5)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.fill_(NAN)
    train(model, optimizer, 11)
    model.load_state_dict(good)
    before = optimizer.stats.as_dict()["attempted"]
    for i in range(30):
        optimizer.set_batch(loss_fn=lambda i=i: loss_of(model, i))
        train(model, optimizer, i + 1, start=i)
    assert optimizer.stats.as_dict()["attempted"] > before
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("loss", [NAN, math.inf])
def test_a_loss_that_is_not_finite_at_the_candidate_rejects_it(loss):
    model, optimizer = make("adamw_foreach", safeguard="loss")
    plain = make_model()
    train(model, optimizer, 12, loss_fn=cycle([1.0, loss]).__next__)
    train(plain, BASES["adamw_foreach"](plain.parameters()), 12)
    assert_same(weights(model), weights(plain))
    assert optimizer.stats.as_dict()["rejected_loss"] > 0


def test_a_loss_function_that_fails_leaves_the_plain_step():
    model, optimizer = make("adamw_foreach", safeguard="loss")
    plain = make_model()
    calls = []

    def fails_at_the_candidate():
        calls.append(1)
        if len(calls) % 2 == 0:
            raise RuntimeError("out of memory")
        return 1.0

    for i in range(7):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        if i in (2, 5):
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.step(loss_fn=fails_at_the_candidate)
        else:
            optimizer.step()
    train(plain, BASES["adamw_foreach"](plain.parameters()), 7)
    assert_same(weights(model), weights(plain))
    assert_counters_add_up(optimizer)


@both
def test_a_base_that_fails_leaves_the_weights_and_can_go_on(options):
    class Fails(Optimizer):
        def step(self, closure=None):
            raise RuntimeError("no")

    model = make_model()
    before = weights(model)
    optimizer = Anderson(Fails(model.parameters(), {"lr": 0.1}), **options)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            optimizer.step()
    assert_same(weights(model), before)
    assert counts(optimizer) == {}
