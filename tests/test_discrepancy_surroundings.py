"""The discrepancy driver among types, layouts, groups, scalers and closures."""

import pytest
import torch
from driven import BOTH, EAGER, Cone, driven, evaluated, predictions, train, trained_plainly
from torch import nn
from torch.optim import SGD
from training import assert_same, counts, loss_of, make_model, weights

from torch_anderson import Anderson, Discrepancy

# ------------------------------------------------------------------------------------- types and precision


def test_complex_least_squares_are_solved():
    """By their real and imaginary parts; the gradient comes as a conjugate that is not worked out yet."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(30, 5, generator=generator, dtype=torch.complex128)
    b = torch.randn(30, generator=generator, dtype=torch.complex128)
    x = nn.Parameter(torch.zeros(5, dtype=torch.complex128))
    settings = Discrepancy("residual", **{**EAGER, "history_size": 10}, damping=1e-10)
    optimizer = Anderson(SGD([x], lr=0.2), discrepancy=settings)
    for _ in range(60):
        optimizer.zero_grad()
        (a @ x - b).abs().square().mean().backward()
        x.grad = x.grad.conj().resolve_conj().conj()
        assert x.grad.is_conj()
        optimizer.step(outputs=lambda: (a @ x - b).conj())
    expected = torch.linalg.lstsq(a, b.unsqueeze(1)).solution[:, 0]
    assert float((x.detach() - expected).norm() / expected.norm()) < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rejected_jumps_leave_parameters_of_any_precision_bit_for_bit(dtype):
    model, optimizer = driven("adamw_foreach", dtype=dtype)
    train(model, optimizer, 20, outputs=Cone(optimizer))
    assert optimizer.stats.counts["rejected_loss"] > 0 == optimizer.stats.counts["accepted"]
    assert_same(weights(model), weights(trained_plainly(20, "adamw_foreach", dtype=dtype)))


def test_half_precision_parameters_are_accelerated():
    model, optimizer = driven(dtype=torch.bfloat16)
    train(model, optimizer, 40)
    assert optimizer.stats.counts["accepted"] > 0
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())


def test_outputs_under_autocast_are_used_by_whole_steps():
    """Differences of outputs in half precision would be noise for tiny steps."""

    def outputs(model, i):
        with torch.autocast("cpu", torch.bfloat16):
            values, targets = predictions(model, i)
        assert values.dtype == torch.bfloat16
        return values, targets

    (model, optimizer), (twin, secant) = driven(dtype=torch.float32), driven(dtype=torch.float32, probe="secant")
    train(model, optimizer, 30, outputs=outputs)
    train(twin, secant, 30, outputs=outputs)
    assert optimizer.stats.counts["accepted"] > 0
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("loss", ["mse", nn.functional.mse_loss])
def test_a_step_inside_autocast_keeps_full_precision(loss):
    def outputs(model, i):
        with torch.autocast("cpu", enabled=False):
            return predictions(model, i)

    def run(cast):
        model, optimizer = driven(loss=loss, dtype=torch.float32, **{**BOTH, "use": "both"})
        for i in range(30):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                optimizer.step(outputs=lambda i=i: outputs(model, i))
        assert optimizer.stats.counts["accepted"] > 0
        with optimizer.accelerated_weights():
            return weights(model)

    assert_same(run(cast=True), run(cast=False))


def test_the_layout_of_parameters_in_memory_makes_no_difference():
    def run(memory_format):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1)).double()
        model.to(memory_format=memory_format)
        x = torch.randn(16, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = lambda model, i: (model(x), x.mean((1, 2, 3)).unsqueeze(1))  # noqa: E731
        _, optimizer = driven(model=model, damping=0.1)
        train(model, optimizer, 10, outputs=found, objective=lambda model, i: nn.functional.mse_loss(*found(model, i)))
        assert optimizer.stats.counts["accepted"] > 0
        return weights(model)

    torch.testing.assert_close(run(torch.channels_last), run(torch.contiguous_format), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------- groups and members


def test_groups_have_their_rates_and_those_left_out_are_the_bases():
    model = make_model(dtype=torch.float64)
    aside, frozen, unused = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    frozen.requires_grad_(False)
    groups = [
        {"params": [*model[0].parameters(), frozen, unused], "lr": 0.05},
        {"params": [*model[2].parameters()], "lr": 0.2},
        {"params": [aside], "anderson": False},
    ]
    optimizer = Anderson(SGD(groups, lr=0.1), discrepancy=Discrepancy("mse", **EAGER))
    train(model, optimizer, 20, objective=lambda model, i: loss_of(model, i) + aside.square().sum())
    assert optimizer.stats.counts["accepted"] > 0
    torch.testing.assert_close(aside.detach(), torch.full((3,), 0.8**20, dtype=torch.float64))
    assert_same([frozen, unused], [torch.ones(3, dtype=torch.float64)] * 2)


def test_a_layer_frozen_on_the_way_stays_as_it_is():
    model, optimizer = driven(**BOTH)
    train(model, optimizer, 15)
    model[0].requires_grad_(False)
    kept = weights(model[0])
    train(model, optimizer, 40, start=15)
    assert_same(weights(model[0]), kept)
    assert optimizer.stats.counts["restarts"] == 1
    with optimizer.accelerated_weights():
        assert loss_of(model, 0) < 1


# ------------------------------------------------------------------------------- how steps are made elsewhere


@pytest.mark.parametrize("when", ["ahead", "in the closure"])
@pytest.mark.parametrize("options", [EAGER, BOTH], ids=["training", "both"])
def test_a_batch_that_is_not_given_with_the_step_serves_as_if_it_were(when, options):
    """Lightning calls the user's function in the closure, so that it comes after the step has begun."""
    (model, optimizer), (twin, expected) = driven("adamw_foreach", **options), driven("adamw_foreach", **options)
    train(twin, expected, 20)
    for i in range(20):
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
    assert_same(evaluated(model, optimizer), evaluated(twin, expected))
    assert counts(optimizer) == counts(expected)


@pytest.mark.parametrize("options", [{"discrepancy": Discrepancy("mse", **EAGER)}, {"safeguard": "loss", "period": 3}])
def test_a_batch_given_in_the_closure_is_the_one_of_this_step_and_no_other(options):
    model = make_model(dtype=torch.float64)
    optimizer = Anderson(SGD(model.parameters(), lr=0.1), **options)
    seen = []
    for i in range(12):

        def look(found, i=i):
            assert i == len(seen) - 1
            return found

        def closure(i=i, look=look):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            optimizer.set_batch(outputs=lambda: look(predictions(model, i)), loss_fn=lambda: look(loss_of(model, i)))
            seen.append(i)
            return loss

        optimizer.step(closure)
    assert optimizer.stats.counts["extra_evaluations"] > 0
    assert optimizer.stats.counts["skipped_no_outputs"] == optimizer.stats.counts["skipped_no_loss"] == 0


@pytest.mark.parametrize("base", ["lbfgs", "list_state", "group_counter", "adagrad", "adamw_fused"])
def test_any_base_can_be_driven(base):
    model, optimizer = driven(base)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(30):
        optimizer.step(closure, outputs=lambda: predictions(model, 0))
    assert optimizer.stats.counts["attempted"] > 0
    assert loss_of(model, 0) < loss_of(make_model(dtype=torch.float64), 0)


def test_a_step_skipped_by_the_gradient_scaler_leaves_no_trace():
    (model, optimizer), (twin, without) = driven(), driven()
    for run, opt, overflows in ((model, optimizer, {2, 5, 6}), (twin, without, ())):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, backoff_factor=0.5, growth_interval=1000)
        for i in range(15):
            for inf in [True] * (i in overflows) + [False]:
                opt.zero_grad()
                scaler.scale(loss_of(run, i) * (float("inf") if inf else 1.0)).backward()
                scaler.step(opt, outputs=lambda run=run, i=i: predictions(run, i))
                scaler.update()
    assert_same(weights(model), weights(twin))
    assert optimizer.stats.counts == without.stats.counts
    assert optimizer.stats.counts["accepted"] > 0


def test_within_disabled_steps_are_the_bases_and_outputs_are_not_called():
    model, optimizer = driven("momentum")
    with optimizer.disabled():
        train(model, optimizer, 20, outputs=lambda model, i: pytest.fail("called"))
    assert_same(weights(model), weights(trained_plainly(20, "momentum")))


def test_hooks_see_parameters_as_they_are_trained():
    model, optimizer = driven()
    seen = []

    def hook(record):
        assert all(p.requires_grad and p.grad is not None for p in model.parameters())
        seen.append((record.accepted, weights(model)))

    optimizer.register_acceleration_hook(hook)
    while not seen:
        train(model, optimizer, 1)
    assert_same(seen[0][1], weights(model))
