"""``GaussNewton`` among types, layouts, groups, scalers and closures."""

import pytest
import torch
from driven import EAGER, Cone, driven, predictions, train, trained_plainly
from torch import nn
from torch.optim import SGD
from training import assert_same, counts, loss_of, make_model, weights

from torch_anderson import GaussNewton

# ------------------------------------------------------------------------------------------- types and precision


def test_complex_least_squares_are_solved():
    """By their real and imaginary parts; the gradient comes as a conjugate that is not worked out yet."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(30, 5, generator=generator, dtype=torch.complex128)
    a *= torch.logspace(0, -1, 5)
    b = torch.randn(30, generator=generator, dtype=torch.complex128)
    x = nn.Parameter(torch.zeros(5, dtype=torch.complex128))
    optimizer = GaussNewton(SGD([x], lr=0.1), **EAGER)
    for _ in range(250):
        optimizer.zero_grad()
        (a @ x - b).abs().square().mean().backward()
        x.grad = x.grad.conj().resolve_conj().conj()
        assert x.grad.is_conj()
        optimizer.step(outputs=lambda: (a @ x - b).conj())
    expected = torch.linalg.lstsq(a, b.unsqueeze(1)).solution[:, 0]
    assert optimizer.stats.counts["accepted"] > 0
    assert float((x.detach() - expected).norm() / expected.norm()) < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rejected_jumps_leave_parameters_of_any_precision_bit_for_bit(dtype):
    model, optimizer = driven("adamw_foreach", dtype=dtype)
    train(model, optimizer, 40, outputs=Cone(optimizer))
    assert optimizer.stats.counts["rejected_loss"] > 0 == optimizer.stats.counts["accepted"]
    assert_same(weights(model), weights(trained_plainly(40, "adamw_foreach", dtype=dtype)))


def test_half_precision_parameters_are_accelerated():
    model, optimizer = driven(dtype=torch.bfloat16)
    train(model, optimizer, 100)
    assert optimizer.stats.counts["accepted"] > 0
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("rounded", [True, False])
def test_outputs_in_half_precision_are_measured_by_whole_steps(rounded):
    """Differences of outputs in half precision would be noise for tiny steps."""
    model, optimizer = driven(dtype=torch.float32)
    seen = []

    def outputs(model, i):
        seen.append(torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]))
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            values, targets = predictions(model, i)
        assert values.dtype == (torch.bfloat16 if rounded else torch.float32)
        return values, targets

    train(model, optimizer, 15)
    before = torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])
    train(model, optimizer, 16, start=15, outputs=outputs)
    step, first = seen[0] - before, seen[2] - seen[0]  # after the start and its repetition comes the present step
    assert optimizer.stats.counts["attempted"] == 1
    assert float(first @ step / first.norm() / step.norm()) == pytest.approx(1, rel=1e-3)
    assert (float(first.norm() / step.norm()) == pytest.approx(1, rel=1e-3)) is rounded


@pytest.mark.parametrize("loss", ["mse", nn.functional.mse_loss])
def test_a_step_inside_autocast_keeps_full_precision(loss):
    def outputs(model, i):
        with torch.autocast("cpu", enabled=False):
            return predictions(model, i)

    def run(cast):
        model, optimizer = driven(loss=loss, dtype=torch.float32)
        for i in range(60):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                optimizer.step(outputs=lambda i=i: outputs(model, i))
        assert optimizer.stats.counts["accepted"] > 0
        return weights(model)

    assert_same(run(cast=True), run(cast=False))


def test_the_layout_of_parameters_in_memory_makes_no_difference():
    def run(memory_format):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1)).double()
        model.to(memory_format=memory_format)
        x = torch.randn(16, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = lambda model, i: (model(x), x.mean((1, 2, 3)).unsqueeze(1))  # noqa: E731
        _, optimizer = driven(model=model)
        train(model, optimizer, 20, outputs=found, objective=lambda model, i: nn.functional.mse_loss(*found(model, i)))
        assert optimizer.stats.counts["accepted"] > 0
        return weights(model)

    torch.testing.assert_close(run(torch.channels_last), run(torch.contiguous_format), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------ groups and members


def test_groups_have_their_rates_and_those_left_out_are_the_bases():
    model = make_model(dtype=torch.float64)
    aside, frozen, unused = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    frozen.requires_grad_(False)
    groups = [
        {"params": [*model[0].parameters(), frozen, unused], "lr": 0.05},
        {"params": [*model[2].parameters()], "lr": 0.2},
        {"params": [aside], "anderson": False},
    ]
    optimizer = GaussNewton(SGD(groups, lr=0.1), loss="mse", **EAGER)
    train(model, optimizer, 40, objective=lambda model, i: loss_of(model, i) + aside.square().sum())
    assert optimizer.stats.counts["accepted"] > 0
    torch.testing.assert_close(aside.detach(), torch.full((3,), 0.8**40, dtype=torch.float64))
    assert_same([frozen, unused], [torch.ones(3, dtype=torch.float64)] * 2)


def test_a_layer_frozen_on_the_way_stays_as_it_is():
    model, optimizer = driven()
    train(model, optimizer, 33)
    model[0].requires_grad_(False)
    kept = weights(model[0])
    accepted = optimizer.stats.counts["accepted"]
    train(model, optimizer, 90, start=33)
    assert_same(weights(model[0]), kept)
    assert optimizer.stats.counts["restarts"] == 1
    assert optimizer.stats.counts["accepted"] > accepted


def test_all_parameters_may_be_frozen_at_first():
    model = make_model(dtype=torch.float64).requires_grad_(False)
    _, optimizer = driven(model=model)
    for _ in range(20):
        optimizer.step(outputs=lambda: pytest.fail("called"))
    model.requires_grad_(True)
    train(model, optimizer, 60)
    assert optimizer.stats.counts["accepted"] > 0


def test_sparse_gradients_are_refused_with_advice():
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = GaussNewton(SGD(table.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="Sparse gradients are not supported"):
        for _ in range(20):
            optimizer.zero_grad()
            table(torch.tensor([1, 2])).square().mean().backward()
            optimizer.step(outputs=lambda: table(torch.tensor([1, 2])))


# ---------------------------------------------------------------------------------------- how steps are made elsewhere


@pytest.mark.parametrize("when", ["ahead", "in the closure"])
def test_outputs_that_are_not_given_with_the_step_serve_as_if_they_were(when):
    """Lightning calls the user's function in the closure, so that it comes after the step has begun."""
    (model, optimizer), (twin, expected) = driven("adamw_foreach"), driven("adamw_foreach")
    train(twin, expected, 40)
    for i in range(40):
        give = lambda i=i: optimizer.set_batch(outputs=lambda: predictions(model, i))  # noqa: E731

        def closure(i=i, give=give):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            if when == "in the closure":
                give()
            return loss

        if when == "ahead":
            give()
        assert optimizer.step(closure) > 0
    assert_same(weights(model), weights(twin))
    assert counts(optimizer) == counts(expected)
    assert expected.stats.counts["accepted"] > 0


def test_outputs_given_ahead_are_for_one_step_only():
    model, optimizer = driven()
    train(model, optimizer, 14)
    optimizer.set_batch(outputs=lambda: pytest.fail("of an earlier step"))
    train(model, optimizer, 30, start=14, outputs=None)
    assert optimizer.stats.counts["skipped_no_outputs"] > 0


@pytest.mark.parametrize("base", ["lbfgs", "list_state", "group_counter", "adagrad", "adamw_fused"])
def test_any_base_can_be_driven(base):
    model, optimizer = driven(base)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure, outputs=lambda: predictions(model, 0))
    assert optimizer.stats.counts["attempted"] > 0
    assert loss_of(model, 0) < loss_of(make_model(dtype=torch.float64), 0)


def test_a_step_skipped_by_the_gradient_scaler_leaves_no_trace():
    (model, optimizer), (twin, without) = driven(), driven()
    for run, opt, overflows in ((model, optimizer, {2, 5, 16}), (twin, without, ())):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, backoff_factor=0.5, growth_interval=1000)
        for i in range(30):
            for inf in [True] * (i in overflows) + [False]:
                opt.zero_grad()
                scaler.scale(loss_of(run, i) * (float("inf") if inf else 1.0)).backward()
                scaler.step(opt, outputs=lambda run=run, i=i: predictions(run, i))
                scaler.update()
    assert_same(weights(model), weights(twin))
    assert optimizer.stats.counts == without.stats.counts
    assert optimizer.stats.counts["accepted"] > 0


def test_a_step_that_moves_nothing_is_not_counted_and_no_jump_follows():
    model, optimizer = driven()
    train(model, optimizer, 15)
    before = weights(model)
    for _ in range(12):
        optimizer.zero_grad()
        (0 * loss_of(model, 0)).backward()
        optimizer.step(outputs=lambda: pytest.fail("called"))
    assert_same(weights(model), before)


def test_gradients_that_are_not_finite_make_no_jump_and_raise_nothing():
    model, optimizer = driven()
    train(model, optimizer, 15)
    for _ in range(3):
        optimizer.zero_grad()
        (loss_of(model, 0) * float("nan")).backward()
        optimizer.step(outputs=lambda: predictions(model))
    assert optimizer.stats.counts["accepted"] == 0 < optimizer.stats.counts["skipped_nonfinite_outputs"]


def test_within_disabled_steps_are_the_bases_and_outputs_are_not_called():
    model, optimizer = driven("momentum")
    with optimizer.disabled():
        train(model, optimizer, 40, outputs=lambda model, i: pytest.fail("called"))
    assert_same(weights(model), weights(trained_plainly(40, "momentum")))


def test_hooks_see_parameters_as_they_are_trained():
    model, optimizer = driven()
    seen = []

    def hook(record):
        assert all(p.requires_grad and p.grad is not None for p in model.parameters())
        seen.append((record.accepted, weights(model)))

    optimizer.register_acceleration_hook(hook)
    train(model, optimizer, 16)
    assert seen[0][0]
    assert_same(seen[0][1], weights(model))


@pytest.mark.parametrize("late", [False, True])
def test_a_group_of_learning_rate_zero_stays_where_it_is(late):
    """From the start, or once it has been trained, so that earlier directions lead away."""
    model = make_model(dtype=torch.float64)
    optimizer = GaussNewton(SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1), loss="mse")
    if late:
        train(model, optimizer, 30)
    optimizer.param_groups[1]["lr"] = 0.0
    before, accepted = weights(model[2]), optimizer.stats.counts["accepted"]
    train(model, optimizer, 90, start=30)
    assert optimizer.stats.counts["accepted"] > accepted
    assert_same(weights(model[2]), before)


def test_a_parameter_without_gradient_is_not_moved_by_a_jump():
    model, optimizer = driven()
    train(model, optimizer, 15)
    bias, before = model[0].bias, model[0].bias.detach().clone()
    optimizer.base.register_step_pre_hook(lambda *_: setattr(bias, "grad", None))
    train(model, optimizer, 60, start=15)
    assert optimizer.stats.counts["accepted"] > 0
    assert_same([bias.detach()], [before])
