"""Each method against what it is by definition: a bare loop, a hand-computed average, the package it comes from."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from schedulefree import AdamWScheduleFree
from shared import small, start

from experiments.methods import EMA_DECAY, METHODS
from experiments.runner import Training
from experiments.tasks import TASKS
from experiments.trainers import LBFGSTrainer
from torch_anderson import Anderson

STEPS = 40


def train(method: str, task: str = "digits", seed: int = 0, **overrides: object) -> Training:
    spec = small(task, method, seed, **overrides)
    training = Training(spec.resolve(), METHODS[method], seed)
    while not training.outcome:
        training.advance()
    return training


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def judged(training: Training) -> torch.Tensor:
    with training.trainer.evaluation_weights():
        return weights(training.problem.model)


def bare_adam(**overrides: object) -> list[torch.Tensor]:
    """The iterates of a loop that anyone would write."""
    problem = start("digits", 0, **overrides)
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=3e-3)
    iterates = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.2 ** (step // 15)
        optimizer.zero_grad()
        problem.loss(step).backward()
        optimizer.step()
        iterates.append(weights(problem.model))
    return iterates


SCHEDULE = {"decay_every": 15}


def test_base_is_the_bare_loop():
    assert torch.equal(judged(train("base", **SCHEDULE)), bare_adam()[-1])


def test_ema_is_the_recursion_by_hand():
    first, *rest = bare_adam()
    average = first
    for iterate in rest:
        average = EMA_DECAY * average + (1 - EMA_DECAY) * iterate
    assert torch.allclose(judged(train("ema", **SCHEDULE)), average, atol=1e-6)


def test_swa_is_the_mean_of_the_last_quarter():
    assert torch.allclose(judged(train("swa", **SCHEDULE)), torch.stack(bare_adam()[30:]).mean(0), atol=1e-6)


def test_swa_is_judged_by_the_present_weights_until_it_begins():
    training = train("swa", steps=20, tol=1e9)
    assert training.step == 1
    assert torch.equal(judged(training), weights(training.problem.model))


def test_lookahead_meets_half_way_every_fifth_step():
    problem = start("digits", 0)
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=3e-3)
    slow = weights(problem.model)
    for step in range(STEPS):
        optimizer.zero_grad()
        problem.loss(step).backward()
        optimizer.step()
        if step % 5 == 4:
            slow = (slow + weights(problem.model)) / 2
            torch.nn.utils.vector_to_parameters(slow.clone(), problem.model.parameters())
    assert torch.allclose(judged(train("lookahead")), slow, atol=1e-6)


def test_schedule_free_is_the_package_and_evaluations_leave_no_trace():
    problem = start("digits", 0)
    optimizer = AdamWScheduleFree(problem.model.parameters(), lr=3e-3)
    optimizer.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        problem.loss(step).backward()
        optimizer.step()
    training = train("schedule-free", learning_rate=3e-3, evaluate_every=1)
    assert torch.equal(weights(training.problem.model), weights(problem.model))
    optimizer.eval()
    assert torch.equal(judged(training), weights(problem.model))


def test_lbfgs_counts_every_gradient_and_keeps_to_the_budget():
    calls = []
    spec = small("burgers2d-fixed", "lbfgs")
    training = Training(spec.resolve(), METHODS["lbfgs"], 0)
    loss = training.problem.loss
    training.problem.loss = lambda step: calls.append(step) or loss(step)
    while not training.outcome:
        training.advance()
    assert training.step == len(calls)
    assert 40 <= training.step <= 41 + LBFGSTrainer.EVALUATIONS
    assert calls[:10] == list(range(10))
    assert set(calls[10:]) == {10}, "the batch is kept"


def test_adamw_goes_down_to_zero_along_a_cosine():
    problem = start("digits", 0)
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=3e-3)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * math.cos(math.pi / 2 * step / STEPS) ** 2
        optimizer.zero_grad()
        problem.loss(step).backward()
        optimizer.step()
    assert torch.allclose(judged(train("adamw-cosine")), weights(problem.model), atol=1e-6)


@pytest.mark.parametrize("method", ["soap", "muon"])
def test_packaged_peers_learn_and_follow_the_schedule(method):
    initial = start("digits", 0).evaluate()["validation_loss"]
    training = train(method, steps=200, decay_every=90)
    assert training.rows[-1]["validation_loss"] < 0.7 * initial
    assert training.trainer.schedule.get_last_lr() == pytest.approx(
        [3e-3 * 0.04] * len(training.trainer.schedule.base_lrs)
    )


def test_muon_orthogonalises_all_matrices_but_the_head():
    training = train("muon", depth=2)
    model, (first, second) = training.problem.model, training.trainer.optimizer.param_groups
    assert [p.shape for p in first["params"]] == [(8, 64), (8, 8)]
    assert {id(p) for p in first["params"] + second["params"]} == {id(p) for p in model.parameters()}
    before = model[2].weight.detach().clone()
    training.trainer.advance(training.problem)
    step = (model[2].weight.detach() - before) / (0.2 * 8**0.5 * first["lr"])
    assert torch.linalg.svdvals(step)[:4].tolist() == pytest.approx([1] * 4, abs=0.4), "as five iterations leave them"


@pytest.mark.skipif(not METHODS["aadl"].applies(TASKS["digits"]()), reason="the reference code is not importable")
def test_the_reference_code_pays_for_two_losses_a_jump():
    training = train("aadl", steps=20, period=5, store_period=1, forward_cost=0.25)
    costs = [after["step"] - before["step"] for before, after in pairwise(training.rows)]
    assert [step + 2 for step, cost in enumerate(costs) if cost != 1] == [5, 10, 15]
    assert max(costs) == 1.5


def test_average_only_never_jumps_and_anderson_does():
    assert train("average", "diabetes").trainer.stats()["accepted"] == 0
    assert train("anderson", "diabetes").trainer.stats()["accepted"] > 0
    both = train("anderson+average", "diabetes", average_window=4)
    assert both.trainer.stats()["accepted"] > 0
    assert not torch.equal(judged(both), judged(train("anderson", "diabetes")))


def test_the_loss_safeguard_gets_its_batch():
    stats = train("anderson", period=5, history_size=3, safeguard="loss").trainer.stats()
    assert stats["extra_evaluations"] > 0
    assert stats["skipped_no_loss"] == 0


def test_gauss_newton_is_for_pinns():
    method = METHODS["gauss-newton-tangent"]
    assert method.applies(TASKS["burgers2d"]()) and not method.applies(TASKS["digits"]())


def test_statistics_of_a_run_are_counts_and_medians_and_none_of_the_latest_jump_alone():
    stats = train("anderson", "diabetes").trainer.stats()
    assert stats["accepted"] > 0 and 0 <= stats["gain"] <= 1 and stats["condition_number"] >= 1
    assert not {"residual_norm", "coefficient_norm", "rank", "step"} & stats.keys()


def test_the_methods_of_the_paper_accelerate_steps_and_the_defaults_gradients():
    task = TASKS["digits"]()
    methods = ("anderson", "anderson+average", "average", "anderson-default")
    options = [METHODS[name].make(task, torch.nn.Linear(2, 1), 0.1).optimizer.options for name in methods]
    assert [each.residual for each in options] == ["step", "step", "step", "gradient"]
    assert options[-1] == Anderson(torch.optim.Adam([torch.zeros(1, requires_grad=True)])).options


def test_the_average_is_built_from_the_settings():
    task = TASKS["diabetes"](average_window=7, average_tolerance=0.5)
    average = task.anderson_options()["average"]
    assert (average.window, average.tolerance) == (7, 0.5)
    assert TASKS["diabetes"](average_window=0).anderson_options()["average"] is None


def test_the_loss_safeguard_pays_for_two_forward_passes():
    training = train("anderson", period=5, history_size=3, safeguard="loss", forward_cost=0.25, max_jump=1e9)
    assert training.trainer.stats()["attempted"] > 0
    assert training.step == training.trainer.steps + 0.5 * training.trainer.stats()["attempted"]


@pytest.mark.parametrize(
    ("method", "settings", "factor"),
    [
        ("matched-anderson", {"relaxation": 0.1, "period": 1}, 0.1),
        ("matched-anderson", {"relaxation": 0.5, "period": 5}, 0.9),
        ("matched-average", {"average_window": 10}, 2 / 11),
        ("matched-anderson+average", {"relaxation": 0.1, "period": 1, "average_window": 10}, 0.1 * 2 / 11),
    ],
)
def test_matched_learning_rates(method, settings, factor):
    task = TASKS["diabetes"](**settings)
    assert METHODS[method].rate(task) == pytest.approx(task.learning_rate * factor)


def test_a_control_that_would_be_the_base_again_does_not_apply():
    assert not METHODS["matched-anderson"].applies(TASKS["burgers2d"]())
    assert not METHODS["average"].applies(TASKS["burgers2d"](average_window=0))
    assert METHODS["lbfgs"].applies(TASKS["burgers2d"]())
    assert not METHODS["lbfgs"].applies(TASKS["digits"]())


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].applies(TASKS["burgers2d"]())])
def test_judging_leaves_training_as_it_was(method):
    training = train(method, "burgers2d", steps=30)
    before = copy.deepcopy(training.problem.model.state_dict())
    judged(training)
    after = training.problem.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_unknown_base_optimizer_is_refused():
    with pytest.raises(ValueError, match="'adam', 'nesterov', 'sgd'"):
        train("base", optimizer="adma")
