"""The study of whole batches: its problems, how gradients are counted, and its records on disk."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("joblib")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from experiments.methods import DESCENTS
from experiments.results import finite
from experiments.solvers.loops import lbfgs, stepwise, unwrapped
from experiments.solvers.meter import Meter, Spent
from experiments.sweep import sweep
from experiments.whole_batch import race
from experiments.whole_batch.batches import plan
from experiments.whole_batch.problems import FAMILY, PROBLEMS, four_up_to
from experiments.whole_batch.race import Entry

QUICK = [problem for problem in FAMILY if problem.name not in ("conv", "fashion", "fashion-relu")]


def case_of(name, seed=0):
    torch.manual_seed(seed)
    return PROBLEMS[name].build(seed)


@pytest.mark.parametrize("problem", QUICK, ids=lambda problem: problem.name)
def test_a_problem_is_the_same_for_the_same_seed_and_differs_for_another(problem):
    first, again, other = (case_of(problem.name, seed).loss(None).item() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("problem", QUICK, ids=lambda problem: problem.name)
def test_a_problem_has_a_gradient_in_float64(problem):
    case = case_of(problem.name)
    case.loss(None).backward()
    assert all(p.dtype == torch.float64 and p.grad is not None and p.grad.isfinite().all() for p in case.parameters)


@pytest.mark.parametrize("problem", FAMILY, ids=lambda problem: problem.name)
def test_rates_span_a_factor_of_thirty(problem):
    for rates in problem.rates.values():
        assert len(rates) == 4 and rates[-1] / rates[0] == pytest.approx(30, rel=0.12)


def test_rates_end_with_the_largest():
    assert four_up_to(1.0) == (0.03, 0.1, 0.3, 1.0)


def test_the_lowest_ridge_loss_is_that_of_the_closed_form():
    from sklearn.datasets import load_breast_cancer

    features = load_breast_cancer(return_X_y=True)[0]
    features = (features - features.mean(0)) / features.std(0)
    design = np.c_[features[:, 1:], np.ones(len(features))]
    target, decay = features[:, 0], 1e-3
    weights = np.linalg.solve(design.T @ design / len(design) + decay * np.eye(30), design.T @ target / len(design))
    lowest = np.mean((design @ weights - target) ** 2) + decay * weights @ weights
    assert min(race.run(Entry("ridge", "lbfgs-100", None, 0))["losses"]) == pytest.approx(lowest, rel=1e-6)


def test_the_optimum_of_least_squares_is_reached_and_not_passed():
    record = race.run(Entry("least-squares", "lbfgs-10", None, 3))
    assert 0 <= min(record["losses"]) - record["optimum"] + 1e-14 < 1e-10


def test_a_batch_of_all_rows_is_the_whole_batch():
    for name in ("softmax", "factors", "huber"):
        case = case_of(name)
        assert case.loss(torch.arange(case.samples)).item() == pytest.approx(case.loss(None).item(), rel=1e-12)


# Counting


class Watched:
    """A case that counts its losses by itself."""

    def __init__(self, case):
        self.calls = 0
        self.case = replace(case, loss=partial(self.count, case.loss))

    def count(self, loss, rows):
        self.calls += 1
        return loss(rows)


@pytest.mark.parametrize("method", [name for name in DESCENTS if not DESCENTS[name].missing])
def test_a_method_is_charged_for_every_gradient_and_for_no_more(method):
    watched = Watched(case_of("least-squares"))
    meter = Meter(watched.case, 17)
    with pytest.raises(Spent):
        DESCENTS[method].descend(meter, 0.01)
    assert len(meter.losses) == len(meter.seconds) == 17
    assert watched.calls == 17 + meter.forward


def test_the_gradients_of_lbfgs_are_those_that_torch_counts():
    meter = Meter(case_of("softmax"), 40)
    with pytest.raises(Spent):
        lbfgs(10, meter, math.nan)
    # torch adds the evaluations of an iteration at its end; the one under way is not yet in.
    counted = meter.optimizer.state[meter.case.parameters[0]]["func_evals"]
    assert 40 - 25 <= counted <= 40


def test_conjugate_gradients_count_what_scipy_counts():
    from scipy.optimize import minimize

    record = race.run(Entry("huber", "cg", None, 0))
    case = case_of("huber")
    calls = []

    def value_and_gradient(point):
        torch.nn.utils.vector_to_parameters(torch.tensor(point), case.parameters)
        loss = case.loss(None)
        gradient = torch.autograd.grad(loss, case.parameters)
        calls.append(loss.item())
        return loss.item(), torch.cat([each.flatten() for each in gradient]).numpy()

    start = torch.nn.utils.parameters_to_vector(case.parameters).detach().numpy()
    found = minimize(value_and_gradient, start, jac=True, method="CG", options={"maxiter": 20})
    assert found.nfev == len(calls) and record["losses"][: len(calls)] == calls


def test_losses_are_those_at_the_weights_of_each_gradient():
    case = case_of("least-squares")
    meter = Meter(case, 3)
    with pytest.raises(Spent):
        stepwise("sgd", unwrapped, meter, 0.1)
    again = case_of("least-squares")
    for loss in meter.losses:
        value = again.loss(None)
        assert value.item() == loss
        (gradient,) = torch.autograd.grad(value, again.parameters)
        with torch.no_grad():
            again.parameters[0] -= 0.1 * gradient


def test_a_diverging_run_ends_early_and_is_kept():
    record = race.run(Entry("least-squares", "sgd", 30.0, 0))
    assert len(record["losses"]) < 300 and not math.isfinite(record["losses"][-1])
    assert finite(record)["losses"][-1] is None


# Records


def some_entries(seeds=(0,)):
    return race.entries([PROBLEMS["least-squares"]], [DESCENTS["sgd"], DESCENTS["cg"]], list(seeds))


def make_all(entries, folder, processes=1):
    """Make what is not there; returns how the runs that were made ended, and what could not be read before."""
    problems = Entry.load(folder)[1]
    return [outcome for outcome in sweep(entries, folder, processes) if not outcome.done_before], problems


def test_runs_that_are_there_are_not_made_again(tmp_path):
    assert len(make_all(some_entries(), tmp_path)[0]) == 5
    assert [outcome.job.seed for outcome in make_all(some_entries((0, 1)), tmp_path)[0]] == [1] * 5
    records, problems = Entry.load(tmp_path)
    assert len(records) == 10 and not problems
    assert all({"date", "versions", "hardware"} <= each.keys() for each in records)


def test_a_damaged_line_costs_its_own_run_alone(tmp_path):
    make_all(some_entries(), tmp_path)
    path = some_entries()[0].line_file(tmp_path)
    whole = path.read_text().splitlines()
    path.write_text("\n".join([whole[0], whole[1][:100], '{"problem": "least-squares"}', whole[3]]))
    path.with_name("adam.jsonl").mkdir()
    made, problems = make_all(some_entries(), tmp_path)
    assert [outcome.job.rate for outcome in made] == [0.03, 0.1]
    assert len(problems) == 3, "two lines and a file that cannot be read"
    assert sum(", line " in each for each in problems) == 2
    assert len(Entry.load(tmp_path)[0]) == 5, "a line without an end does not spoil the next one"


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    real = race.run
    monkeypatch.setattr(race, "run", lambda entry: 1 / 0 if entry.rate == 0.03 else real(entry))
    made, _ = make_all(some_entries(), tmp_path)
    assert [outcome.error for outcome in made if outcome.error] == ["ZeroDivisionError: division by zero"]
    assert len(Entry.load(tmp_path)[0]) == 4


def test_a_file_that_cannot_be_written_costs_its_own_runs_alone(tmp_path):
    path = some_entries()[0].line_file(tmp_path)
    path.mkdir(parents=True)
    made, _ = make_all(some_entries(), tmp_path)
    assert [outcome.job.method for outcome in made if not outcome.failed] == ["cg"]
    assert all(str(path) in outcome.error for outcome in made if outcome.failed)


@pytest.mark.slow
def test_several_processes_make_the_same_runs(tmp_path):
    for processes in (1, 2):
        make_all(some_entries(), tmp_path / str(processes), processes)
    one, two = (Entry.load(tmp_path / name)[0] for name in ("1", "2"))
    by_rate = [{each["rate"]: each["losses"] for each in records} for records in (one, two)]
    assert by_rate[0] == by_rate[1] and len(one) == 5


def test_missing_data_are_named_and_leave_the_other_problems(capsys, tmp_path):
    asked = plan(["least-squares", "fashion"], ["sgd"], [0])
    assert "fashion is left out" in (message := capsys.readouterr().err) and "apt-get" in message
    assert {job.problem for job in asked} == {"least-squares"}


def test_a_package_that_is_not_installed_is_named(capsys, tmp_path):
    method = replace(DESCENTS["aadl-sgd"], needs=("no_such_module",))
    assert "no_such_module" in method.missing and not DESCENTS["sgd"].missing
