"""Driving by the tangent: who makes the steps, which samples stay, resuming, and what cannot be used."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.func import grad
from torch.optim import SGD, Adam
from training import assert_same, counts, weights

from torch_anderson import GaussNewton, Objective, Term


def network(dtype=torch.float64, *layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), *layers, nn.Linear(8, 1)).to(dtype)


def decay(u, t):
    return grad(u)(t).sum() + u(t)


def at_zero(u, t):
    return u(t) - 1


class Points:
    """A sampler that can be pickled, and remembers what it drew."""

    def __init__(self, dtype=torch.float64):
        self.dtype, self.drawn = dtype, []

    def __call__(self, count):
        self.drawn.append(torch.rand(count, 1, dtype=self.dtype))
        return self.drawn[-1]


def equation(model, sampler=None, **changed):
    dtype = next(model.parameters()).dtype
    terms = {
        "inside": Term(decay, sampler or Points(dtype), count=30),
        "start": Term(at_zero, torch.zeros(1, 1, dtype=dtype), weight=2.0),
    }
    return Objective(model, **terms | changed)


def driven(dtype=torch.float64, base=lambda p: Adam(p, lr=1e-3), **options):
    model = network(dtype)
    torch.manual_seed(1)
    return model, GaussNewton(base(model.parameters()), **options), equation(model)


def train(optimizer, objective, steps):
    return [float(optimizer.step(objective)) for _ in range(steps)]


# ------------------------------------------------------------------------------------------------- who makes the steps


def test_jumps_need_no_gradient_and_no_base_step():
    model, optimizer, objective = driven()
    losses = train(optimizer, objective, 3)
    assert optimizer.stats.counts["accepted"] == 3
    assert all(p.grad is None for p in model.parameters()) and not optimizer.base.state
    assert losses[2] < losses[0]


def test_the_loss_returned_is_that_before_the_step_on_its_samples():
    model, optimizer, _ = driven()
    points = torch.rand(20, 1, dtype=torch.float64)
    objective = equation(model, inside=Term(decay, points))
    for _ in range(6):  # a base step is compared on the way
        expected = objective.draw().loss().item()
        assert float(optimizer.step(objective)) == pytest.approx(expected)


def test_the_base_makes_a_step_now_and_then_which_is_undone_if_it_is_worse():
    model, optimizer, objective = driven(base=lambda p: SGD(p, lr=1e3))
    losses = train(optimizer, objective, 20)
    assert any(p.grad is not None for p in model.parameters())
    assert losses[-1] < 1e-3 * losses[0]


def test_it_rests_where_jumps_fit_the_noise_of_their_batch():
    """Labels without any pattern, in small batches: what fits one batch is wrong for the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    objective = Objective(model, only=Term(lambda u, x, y: u(x) - y, (torch.zeros(1, 5).double(), torch.zeros(1))))
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.05))
    for _ in range(300):
        batch = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
        optimizer.step(objective(only=batch))
    assert optimizer.stats.counts["attempted"] < 60
    assert optimizer.stats.gauges()["wait"] > 20


@pytest.mark.parametrize("options", [{}, {"directions": "tangent"}, {"directions": "history"}])
def test_an_objective_means_the_tangent_unless_the_history_is_asked_for(options):
    _, optimizer, objective = driven(**options)
    optimizer.step(objective)
    assert optimizer.stats.counts["attempted"] == (0 if options.get("directions") == "history" else 1)


def test_outputs_mean_the_history():
    model = network()
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-2), budget=0.9)
    x = torch.rand(20, 1, dtype=torch.float64)
    for _ in range(30):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step(outputs=lambda: model(x) - 1)
    assert "differences" in optimizer.stats.gauges() and optimizer.stats.counts["attempted"] > 0


def test_samples_given_ahead_serve_a_step_without_closure():
    _, optimizer, objective = driven(directions="tangent")
    for _ in range(60):
        closure = objective.draw()
        optimizer.set_batch(outputs=closure)
        loss = closure()
        optimizer.step()
    assert optimizer.stats.counts["accepted"] > 5 and loss < 1e-3


def test_within_disabled_steps_are_the_bases():
    (model, optimizer, objective), (twin, _, other) = driven(), driven()
    base = Adam(twin.parameters(), lr=1e-3)
    with optimizer.disabled():
        torch.manual_seed(2)
        train(optimizer, objective, 3)
    torch.manual_seed(2)
    for _ in range(3):
        base.step(other)
    assert_same(weights(model), weights(twin))
    train(optimizer, objective, 1)
    assert optimizer.stats.counts["accepted"] == 1


def test_hooks_see_a_record_of_each_jump():
    _, optimizer, objective = driven()
    records = []
    optimizer.register_acceleration_hook(records.append)
    train(optimizer, objective, 3)
    assert [record.accepted for record in records] == [True] * 3
    assert records[0].rank == 24 and 0 <= records[0].gain < 1  # about one row a weight, of 25: 23 drawn, one fixed


def test_a_group_may_be_added_on_the_way():
    model = network()
    optimizer, objective = GaussNewton(Adam(model[0].parameters(), lr=1e-3)), equation(model)
    kept = model[2].weight.clone()
    train(optimizer, objective, 3)
    assert torch.equal(model[2].weight, kept)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert train(optimizer, objective, 10)[-1] < 1e-3
    assert not torch.equal(model[2].weight, kept)


def test_samples_given_during_the_base_step_serve_a_jump_after_it():
    """As with Lightning, whose closure runs the training step."""
    _, optimizer, objective = driven(directions="tangent")

    def closure():
        drawn = objective.draw()
        optimizer.set_batch(outputs=drawn)
        return drawn()

    for _ in range(60):
        loss = optimizer.step(closure)
    assert optimizer.stats.counts["accepted"] > 5 and loss < 1e-3


# ------------------------------------------------------------------------------------------------------- the samples


def test_samples_above_the_mean_stay_and_others_are_drawn_anew():
    model, sampler = network(), Points()
    objective = equation(model, inside=Term(decay, sampler, count=30, retain=True))
    closure = objective.draw()
    with torch.no_grad():
        sizes = torch.vmap(lambda t: decay(objective.u, t))(closure.bound["inside"][0]).abs()
    closure()
    kept = set(closure.bound["inside"][0][sizes > sizes.mean(), 0].tolist())
    assert 0 < len(kept) < 30
    again = objective.draw().bound["inside"][0]
    fresh = sampler.drawn[-1]
    assert len(again) == 30 and kept < set(again[:, 0].tolist()) <= kept | set(fresh[:, 0].tolist())


def test_samples_are_drawn_anew_where_none_shall_stay():
    sampler = Points()
    objective = equation(network(), inside=Term(decay, sampler, count=30, retain=False))
    objective()
    assert torch.equal(objective.draw().bound["inside"][0], sampler.drawn[-1])


@pytest.mark.parametrize("retain, kept", [(True, {"inside"}), (None, set()), (False, set())])
def test_samples_stay_with_other_optimizers_if_asked_to(retain, kept):
    model, sampler = network(), Points()
    objective = equation(model, inside=Term(decay, sampler, count=30, retain=retain))
    Adam(model.parameters()).step(objective)
    assert set(objective.retained) == kept  # fixed samples stay anyway


def test_given_samples_are_the_only_ones_of_their_term():
    model, seen = network(), []

    def looked_at(u, t):
        seen.append(t)
        return decay(u, t)

    sampler = Points()
    objective = equation(model, inside=Term(looked_at, sampler, count=30))
    optimizer = GaussNewton(Adam(model.parameters()))
    for _ in range(60):
        loss = optimizer.step(objective(inside=torch.rand(30, 1, dtype=torch.float64)))
    assert not sampler.drawn and loss < 1e-3


def test_samples_given_for_one_step_do_not_replace_fixed_ones():
    _, optimizer, objective = driven()
    other = torch.full((4, 1), 7.0, dtype=torch.float64)
    for _ in range(12):
        optimizer.step(objective(start=other, inside=torch.rand(30, 1, dtype=torch.float64)))
    assert optimizer.stats.counts["attempted"] > 0
    assert torch.equal(objective.draw().bound["start"][0], torch.zeros(1, 1, dtype=torch.float64))


def test_more_samples_are_drawn_while_jumps_fit_only_their_own():
    _, optimizer, objective = driven()
    train(optimizer, objective, 2)
    assert len(objective.retained["inside"].samples[0]) == 69  # 23 fitted
    optimizer._driver.state.blocks = 4.0
    train(optimizer, objective, 1)
    assert len(objective.retained["inside"].samples[0]) == 138  # 92 fitted


@pytest.mark.parametrize(("width", "rows"), [(8, 25), (100, 301), (200, 500)])
@pytest.mark.parametrize("count", [6, 60])
def test_few_samples_in_a_gradient_do_not_make_few_rows(width, rows, count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    optimizer = GaussNewton(Adam(model.parameters()))
    optimizer.step(Objective(model, inside=Term(decay, Points(), count=count)))
    assert abs(optimizer.stats.latest.history_len - rows) <= 1


@pytest.mark.parametrize(("count", "fitted"), [(40, 80), (600, 1200), (250_000, 500)])
def test_fixed_samples_are_all_fitted_at_once_where_that_is_cheap(count, fitted):
    model = network()

    def fit(u, t):
        return u(t), 2 * u(t) - t.sum()  # two residuals a sample: the first plan does not know of them

    optimizer = GaussNewton(Adam(model.parameters()))
    optimizer.step(Objective(model, fit=Term(fit, torch.rand(count, 1, dtype=torch.float64))))
    residuals, state = optimizer._driver.residuals, optimizer._driver.state
    found = optimizer._driver.plan(residuals, {}, state.whole_blocks)
    assert 2 * found.fitted["fit"] == fitted


# ---------------------------------------------------------------------------------------------------------- resuming


def through_a_file(model, optimizer, objective, dtype):
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), objective.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer, objective = driven(dtype)
    for part, state in zip((model, optimizer, objective), saved, strict=True):
        part.load_state_dict(state)
    return model, optimizer, objective


def through_a_distributed_checkpoint(model, optimizer, objective, dtype):
    twin, other, again = driven(dtype, directions="tangent")
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    again.load_state_dict(copy.deepcopy(objective.state_dict()))
    return twin, other, again


CONTINUED = {
    "file": through_a_file,
    "distributed checkpoint": through_a_distributed_checkpoint,
    "copy": lambda *run: copy.deepcopy(run[:3]),
    "pickle": lambda *run: pickle.loads(pickle.dumps(run[:3])),
}


@pytest.mark.parametrize(
    ("how", "dtype", "middle"),
    [*((how, torch.float32, 7) for how in CONTINUED), ("file", torch.float64, 0), ("file", torch.float64, 4)],
)
def test_training_goes_on_bit_for_bit(how, dtype, middle):
    run = driven(dtype)
    train(*run[1:], middle)
    twin = CONTINUED[how](*run, dtype)
    assert counts(run[1]) == counts(twin[1])
    for _, optimizer, objective in (run, twin):
        torch.manual_seed(5)
        train(optimizer, objective, 12)
    assert_same(weights(run[0]), weights(twin[0]))
    assert counts(run[1]) == counts(twin[1])
    assert run[1].stats.gauges() == twin[1].stats.gauges()


def test_a_checkpoint_of_an_objective_with_other_terms_is_refused():
    _, optimizer, objective = driven()
    optimizer.step(objective)
    other = Objective(network(), only=Term(decay, Points(), count=3))
    with pytest.raises(ValueError, match=r"another objective.*inside"):
        other.load_state_dict(objective.state_dict())


def test_a_checkpoint_made_with_the_history_is_refused_by_the_tangent():
    _, optimizer, objective = driven(directions="history")
    train(optimizer, objective, 6)
    _, other, _ = driven(directions="tangent")
    with pytest.raises(ValueError, match="another accelerator"):
        other.load_state_dict(optimizer.state_dict())


def test_weights_written_by_others_are_the_new_start():
    model, optimizer, objective = driven()
    train(optimizer, objective, 5)
    torch.manual_seed(3)
    fresh = [torch.randn_like(p) for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), fresh, strict=True):
            p.copy_(value)
    twin = copy.deepcopy(model)
    loss = float(optimizer.step(objective))
    samples = {name: kept.samples for name, kept in objective.retained.items()}
    assert loss == pytest.approx(Objective(twin, **objective.terms).draw(**samples).loss().item())


def test_a_reset_starts_anew_and_keeps_the_weights():
    model, optimizer, objective = driven()
    train(optimizer, objective, 12)
    before = weights(model)
    optimizer.reset_history()
    assert_same(weights(model), before)
    assert optimizer.stats.gauges()["length"] == 0.125


# ------------------------------------------------------------------------------------------------ parameters, buffers


def test_frozen_layers_and_groups_that_take_no_part_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    groups = [{"params": [model[2].weight, *model[0].parameters()]}, {"params": [model[2].bias], "anderson": False}]
    optimizer, objective = GaussNewton(SGD(groups, lr=0.0 + 1e-9)), equation(model)
    kept = model[0].weight.clone(), model[2].bias.clone()
    losses = train(optimizer, objective, 3)
    assert losses[-1] < losses[0]
    assert torch.equal(model[0].weight, kept[0]) and torch.equal(model[2].bias, kept[1])


@pytest.mark.parametrize("late", [False, True])
def test_a_group_of_learning_rate_zero_stays_and_moves_again_from_where_it_is(late):
    model = network()
    optimizer = GaussNewton(SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=1e-3))
    objective = equation(model)
    train(optimizer, objective, 3 if late else 0)
    optimizer.param_groups[1]["lr"] = 0.0
    kept, accepted = weights(model[2]), optimizer.stats.counts["accepted"]
    losses = train(optimizer, objective, 6)
    assert optimizer.stats.counts["accepted"] > accepted and losses[-1] < losses[0]
    assert_same(weights(model[2]), kept)
    optimizer.param_groups[1]["lr"] = 1e-3
    assert train(optimizer, objective, 6)[-1] < losses[-1]
    assert not any(torch.equal(now, before) for now, before in zip(weights(model[2]), kept, strict=True))


def test_the_memory_has_the_weights_of_all_parameters_whatever_their_rates():
    """Otherwise a group whose rate was 0 at the last jump could be taken back to zeros."""
    model = network()
    optimizer = GaussNewton(SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=1e-3))
    optimizer.param_groups[1]["lr"] = 0.0
    train(optimizer, equation(model), 1)
    saved = optimizer.state
    for p in model.parameters():
        assert torch.equal(saved[p]["anderson_weights"].reshape(p.shape), p.detach())


def test_values_of_retained_samples_do_not_outlive_a_write_to_frozen_parameters():
    model = network()
    model[0].requires_grad_(False)
    points = torch.rand(20, 1, dtype=torch.float64)
    optimizer, objective = GaussNewton(SGD(model.parameters(), lr=1e-3)), equation(model, inside=Term(decay, points))
    train(optimizer, objective, 2)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    expected = objective.draw().loss().item()
    assert float(optimizer.step(objective)) == pytest.approx(expected)


def test_a_layer_may_be_frozen_on_the_way():
    model, optimizer, objective = driven()
    train(optimizer, objective, 3)
    model[0].requires_grad_(False)
    kept = model[0].weight.clone()
    assert train(optimizer, objective, 5)[-1] < 0.5
    assert torch.equal(model[0].weight, kept)


class Decaying(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.rate = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x)


def test_an_unknown_coefficient_of_the_model_is_found():
    """u' = -k u with data of k = 2."""
    model = Decaying()
    t = torch.linspace(0, 1, 20, dtype=torch.float64).reshape(-1, 1)
    objective = Objective(
        model,
        inside=Term(lambda u, t: grad(u)(t).sum() + model.rate * u(t), Points(), count=60),
        data=Term(lambda u, t, y: u(t) - y, (t, torch.exp(-2 * t[:, 0]))),
    )
    train(GaussNewton(Adam(model.parameters())), objective, 60)
    assert model.rate.item() == pytest.approx(2.0, abs=1e-4)


def test_parameters_outside_the_model_make_plain_steps(caplog):
    model, factor = network(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = GaussNewton(SGD([*model.parameters(), factor], lr=1e-2))
    objective = equation(model, start=Term(lambda u, t: factor * u(t) - 1, torch.zeros(1, 1).double()))
    train(optimizer, objective, 5)
    assert optimizer.stats.counts["skipped_outside_parameters"] > 0
    assert "make them part of it" in caplog.text and factor.item() != 1.0


def test_dropout_makes_plain_steps_and_says_what_to_do(caplog):
    model = network(torch.float64, nn.Dropout(0.5))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    train(optimizer, equation(model), 5)
    assert optimizer.stats.counts["skipped_random_outputs"] > 0
    assert "directions='history'" in caplog.text and any(p.grad is not None for p in model.parameters())


def test_buffers_are_used_and_never_changed():
    model = network(torch.float64, nn.BatchNorm1d(8)).eval()
    with torch.no_grad():
        model[2].running_mean.uniform_()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    losses = train(optimizer, equation(model), 8)
    assert losses[-1] < losses[0] and optimizer.stats.counts["accepted"] > 4
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())


# ------------------------------------------------------------------------------------------------------- what is wrong


def test_residuals_that_become_nan_make_plain_steps_and_nothing_is_lost(caplog):
    model, bad = network(), torch.zeros((), dtype=torch.float64)
    objective = equation(model, start=Term(lambda u, t: u(t) - 1 + bad, torch.zeros(1, 1).double()))
    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    train(optimizer, objective, 3)
    bad.fill_(float("nan"))
    objective.at = None  # what was known of retained samples
    before = weights(model)
    assert optimizer._driver.accelerate(objective.bind(), {}) is None
    assert_same(weights(model), before)
    assert optimizer.stats.counts["skipped_nonfinite_outputs"] == 1 and "not finite" in caplog.text
    bad.fill_(0.0)
    assert train(optimizer, objective, 6)[-1] < 0.1


def gradient_by_autograd(u, t):
    x = t.clone()
    return torch.autograd.grad(u(x), x, create_graph=True)[0].sum()


WRONG = {
    "nothing": (lambda u, t: None, TypeError, "returned NoneType"),
    "a number": (lambda u, t: 1.0, TypeError, "returned float"),
    "no dependence": (lambda u, t: t.sum(), ValueError, "does not depend on the model's weights"),
    "not finite": (lambda u, t: u(t) / 0, ValueError, "is not finite"),
    "autograd": (gradient_by_autograd, RuntimeError, "torch.func"),
    "a choice by if": (lambda u, t: u(t) if u(t) > 0 else t.sum(), RuntimeError, "torch.where"),
    "the user's error": (lambda u, t: {}["missing"], KeyError, "missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_is_no_residual_is_refused_and_nothing_changes(name):
    function, error, message = WRONG[name]
    model = network()
    before = weights(model)
    optimizer = GaussNewton(SGD(model.parameters(), lr=0.1))
    with pytest.raises(error, match=f"(?s){message}"):
        optimizer.step(equation(model, inside=Term(function, Points(), count=5)))
    assert_same(weights(model), before)


def test_a_sampler_that_changes_its_mind_is_refused_by_name():
    calls = []

    def sampler(count):
        calls.append(count)
        return torch.rand(count if len(calls) < 4 else count - 1, 1, dtype=torch.float64)

    model = network()
    optimizer, objective = GaussNewton(SGD(model.parameters(), lr=0.1)), equation(model, sampler)
    with pytest.raises(ValueError, match="sampler of 'inside'"):
        train(optimizer, objective, 6)


def test_a_function_that_writes_to_the_weights_makes_plain_steps(caplog):
    model = network()

    def writes(u, t):
        model[2].bias.data.mul_(1.5)
        return u(t) - 1

    optimizer = GaussNewton(SGD(model.parameters(), lr=1e-3))
    train(optimizer, Objective(model, only=Term(writes, Points(), count=5)), 3)
    assert optimizer.stats.counts["skipped_outputs_wrote"] > 0 and "must only evaluate" in caplog.text
    assert optimizer.stats.counts["accepted"] == 0
