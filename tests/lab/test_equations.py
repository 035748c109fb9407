"""The study of equations: solutions, references, methods, the clock, the store, scores and the page."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import vmap

from torch_anderson import Objective, Term
from torch_anderson.lab import jobs, lines
from torch_anderson.lab.equations import command, quasi_newton, race, references, surrogates
from torch_anderson.lab.equations import problems as eq
from torch_anderson.lab.equations.case import Case, Problem, network, zero
from torch_anderson.lab.equations.clock import Clock, Spent, marks
from torch_anderson.lab.equations.levenberg_marquardt import Residuals, bundles
from torch_anderson.lab.equations.methods import METHODS, Method, missing
from torch_anderson.lab.equations.page import build_page
from torch_anderson.lab.equations.race import Entry
from torch_anderson.lab.equations.scores import Scores, best_rates, error_at
from torch_anderson.lab.equations.store import load, unfinished
from torch_anderson.lab.equations.surrogates import PROBLEMS
from torch_anderson.lab.equations.traced import TracedLoss

# Equations and their solutions


def residuals(term, u, count=40):
    """Of a term at some samples, with a function in the place of the model."""
    samples = term.draw("some", None if term.fixed else count)
    found = vmap(lambda *sample: term.function(u, *sample))(*samples)
    return torch.stack(found if isinstance(found, tuple) else (found,))


EXACT = {
    "convection": eq.convection_exact, "reaction": eq.reaction_exact, "helmholtz": eq.helmholtz_exact,
    "poisson3d": eq.product_of_sines, "poisson10d": eq.sum_of_cosines,
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_all_residuals_vanish_on_the_exact_solution(name):
    case, u = PROBLEMS[name].build(), EXACT[name]
    for label, term in case.terms.items():
        # The bell curve of the reaction is periodic up to its tail, exp(-8).
        allowed = 1e-3 if (name, label) == ("reaction", "sides") else 1e-10
        assert residuals(term, u).abs().max() < allowed, label
    assert torch.allclose(vmap(u)(case.points[:100]), case.expected[:100], atol=1e-14)


def test_a_wrong_function_has_residuals():
    case = PROBLEMS["helmholtz"].build()
    assert residuals(case.terms["interior"], lambda x: 1.01 * eq.helmholtz_exact(x)).abs().max() > 0.1


def cole_hopf(point):
    """The solution of Burgers' equation at one point, with derivatives."""
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite.hermgauss(200))
    y = point[1] - torch.sqrt(4 * eq.VISCOSITY * point[0]) * nodes
    exponent = -torch.cos(math.pi * y) / (2 * math.pi * eq.VISCOSITY)
    factors = torch.exp(exponent - exponent.detach().max()) * weights
    return -(torch.sin(math.pi * y) * factors).sum() / factors.sum()


@pytest.mark.parametrize("name", ["burgers2d", "burgers2d-fixed"])
def test_the_residual_of_burgers_equation_vanishes_on_its_solution(name):
    case = PROBLEMS[name].build()
    # Early, the quadrature's nodes have large derivatives by time.
    points = torch.rand(40, 2, dtype=torch.float64) * torch.tensor([0.9, 2.0]) + torch.tensor([0.1, -1.0])
    residual = vmap(lambda point: case.terms["interior"].function(cole_hopf, point))(points)
    assert residual.abs().max() < 1e-7
    assert residuals(case.terms["edges"], cole_hopf).abs().max() < 1e-10
    assert torch.allclose(vmap(cole_hopf)(case.points[::97]), case.expected[::97], atol=1e-12)


def interpolated(values):
    """The reference as a function near t = 1/2: polynomials of degree 8 in time, Fourier series in space."""
    times, count = len(values) - 1, values.shape[1]
    rows = np.arange(times // 2 - 4, times // 2 + 5)
    waves = torch.from_numpy(np.fft.rfft(values[rows])[:, : count // 2] / count)
    nodes = torch.from_numpy(rows / times)
    factors = torch.full((count // 2,), 2.0, dtype=torch.float64)
    factors[0] = 1.0
    others = [torch.cat([nodes[:i], nodes[i + 1 :]]) for i in range(len(nodes))]

    def u(point):
        basis = torch.stack([((point[0] - o) / (n - o)).prod() for n, o in zip(nodes, others, strict=True)])
        angle = math.pi * torch.arange(count // 2, dtype=torch.float64) * (point[1] + 1)
        real, imaginary = (part.to(torch.float64).T @ basis for part in (waves.real, waves.imag))
        return (factors * (real * torch.cos(angle) - imaginary * torch.sin(angle))).sum()

    return u


@pytest.mark.parametrize(
    "name, values, allowed",
    [
        ("allen-cahn", lambda: references.allen_cahn(512, 200, 10), 1e-6),
        ("kdv", lambda: references.korteweg_de_vries(512, 800, 10), 1e-6),
    ],
)
def test_the_residual_vanishes_on_the_spectral_reference(name, values, allowed):
    case, u = PROBLEMS[name].build(), interpolated(values())
    points = torch.rand(30, 2, dtype=torch.float64) * torch.tensor([0.002, 2.0]) + torch.tensor([0.499, -1.0])
    assert vmap(lambda point: case.terms["interior"].function(u, point))(points).abs().max() < allowed
    # Values and derivatives at both ends of the period are the same.
    sides = points.clone()
    sides[:, 1] = -1
    found = vmap(lambda point: torch.stack(case.terms["sides"].function(u, point)))(sides)
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["allen-cahn", "kdv"])
def test_a_reference_starts_with_the_first_values_and_has_its_grid(name):
    case = PROBLEMS[name].build()
    points, values = case.terms["start"].draw("start", 20)
    first = case.points[:, 0] == 0
    places, expected = case.points[first, 1], case.expected[first]
    nearest = (points[:, 1:] - places).abs().argmin(1)
    assert (points[:, 0] == 0).all()
    step = float(places[1] - places[0])
    assert (values - expected[nearest]).abs().max() < 4 * step
    assert len(case.points) == len(case.expected) == first.sum() * 101


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_the_references_converge_like_spectral_methods():
    ac = [references.allen_cahn(n, 10, 50)[:, :: n // 128] for n in (512, 1024, 2048)]
    assert relative(ac[0], ac[2]) < 3e-7 and relative(ac[1], ac[2]) < 3e-9
    assert relative(ac[2], references.allen_cahn(2048, 10, 100)[:, ::16]) < 1e-9, "steps in time"
    kdv = [references.korteweg_de_vries(n, 10, 800)[:, :: n // 128] for n in (128, 256, 512)]
    assert relative(kdv[0], kdv[2]) < 1e-4 and relative(kdv[1], kdv[2]) < 1e-10


def test_the_exponential_step_has_order_four():
    """On u' = u^2 - 2 u, whose solution is known."""
    exact = 2 / (1 + math.exp(2.0))  # from u(0) = 1
    errors = []
    for steps in (10, 20):
        found = references.integrate(
            np.ones_like, np.full(3, -2.0 + 0j), lambda w: np.fft.rfft(np.fft.irfft(w, 4) ** 2), 1, steps
        )
        errors.append(abs(found[-1, 0] - exact))
    assert 13 < errors[0] / errors[1] < 19


# Surrogates


def test_a_surrogate_is_standardised_by_its_training_rows_and_judged_on_others():
    random = np.random.default_rng(3)
    inputs, targets = random.normal(5, 2, (100, 2)), random.normal(-3, 7, (100, 2))
    x, y, x_test, y_test = surrogates.split(inputs, targets)
    assert len(x) == 75 and len(x_test) == 25
    assert torch.allclose(y.mean(0), torch.zeros(2, dtype=y.dtype), atol=1e-12) and torch.allclose(
        y.std(0, correction=0), torch.ones(2, dtype=y.dtype)
    )
    both = torch.cat([y, y_test])
    assert len(torch.unique(both, dim=0)) == 100, "no row is in both parts"
    case = surrogates.regression((x, y, x_test, y_test), 4, 1)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
        case.model[-1].bias.copy_(y_test.mean(0))
    assert case.error() == pytest.approx(1.0), "the mean has an error of one standard deviation"


@pytest.mark.parametrize("name", ["fluid", "engine"])
def test_the_real_data_are_what_they_should_be(name):
    for package in PROBLEMS[name].needs:
        if missing("", (package,)):
            pytest.skip(f"no module {package}")
    case = PROBLEMS[name].build()
    x, y = case.terms["fit"].samples
    assert x.isfinite().all() and y.isfinite().all() and len(x) > 700
    if name == "fluid":
        from CoolProp.CoolProp import PropsSI

        assert PropsSI("Dmass", "T", 400.0, "P", 1e6, surrogates.FLUID) == pytest.approx(
            1e6 * 0.0440098 / (8.31446 * 400.0), rel=0.05
        ), "close to an ideal gas"


def test_a_missing_package_leaves_its_problem_out_with_a_message(monkeypatch, capsys):
    monkeypatch.setitem(PROBLEMS, "fluid", replace(PROBLEMS["fluid"], needs=("no_such_module",)))
    problems, _ = command.available(["fluid", "reaction"], ["adam"])
    assert [problem.name for problem in problems] == ["reaction"]
    message = capsys.readouterr().err
    assert "no_such_module" in message and "torch-anderson[surrogates]" in message


# Methods


def tiny_equation():
    """u' = cos on [-1, 1], u(0) = 0."""
    points = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    terms = {
        "inside": Term(
            lambda u, x: torch.func.grad(u)(x).sum() - torch.cos(x).sum(),
            lambda count: 2 * torch.rand(count, 1, dtype=torch.float64) - 1,
            count=20,
        ),
        "start": Term(zero, torch.zeros(1, 1, dtype=torch.float64), weight=2.0),
    }
    return Case(network(1, 5, 1), terms, points, torch.sin(points[:, 0]))


def tiny_table():
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = torch.cat([torch.sin(2 * x), x**2], 1)
    return surrogates.regression((x, y, x[1::3] + 0.01, y[1::3]), 5, 1)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(quasi_newton, "WARM_UP", 20)
    equation = Problem(name="tiny", title="tiny", group="burgers", build=tiny_equation)
    table = Problem(name="table", title="table", group="surrogates", build=tiny_table, drawn=False)
    monkeypatch.setitem(PROBLEMS, "tiny", equation)
    monkeypatch.setitem(PROBLEMS, "table", table)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name, tiny, pretended_time):
    method = METHODS[name]
    if reason := missing(name, method.needs):
        pytest.skip(reason)
    for problem in ("tiny", "table"):
        if method.suits(PROBLEMS[problem]):
            rate = method.rates[-2 if len(method.rates) > 1 else 0]
            seconds = 0.4 if method.family else 0.04  # 400 steps of the first order, 40 of others
            record = Entry(problem, name, rate, 0, seconds).make()
            assert record["steps"] > 1 and record["errors"][-1] < 0.9 * PROBLEMS[problem].build().error()
            assert record["times"][-1] >= seconds and len(record["times"]) == len(record["errors"])


def test_a_traced_loss_is_the_objective():
    torch.manual_seed(0)
    for name in ("allen-cahn", "burgers2d-fixed"):
        case = PROBLEMS[name].build()
        objective = Objective(case.model, **case.terms)
        drawn = objective.draw()
        loss = drawn()
        gradients = [p.grad.clone() for p in case.model.parameters()]
        closure = TracedLoss(objective).on(drawn.draw())
        for _ in range(2):  # traced, and from the trace
            assert closure().item() == pytest.approx(loss.item(), rel=1e-12)
            for parameter, gradient in zip(case.model.parameters(), gradients, strict=True):
                assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_the_loss_of_levenberg_marquardt_is_the_objective():
    torch.manual_seed(0)
    case = PROBLEMS["burgers2d-fixed"].build()
    found = Residuals(case)(bundles(case.terms))
    assert found.square().sum(1).mean().item() == pytest.approx(Objective(case.model, **case.terms)().item(), rel=1e-12)


def some_update(tau_phi, monkeypatch):
    """A matrix before and after an update, the step and the change of the gradient."""
    random = np.random.default_rng(0)
    root = random.normal(size=(6, 6))
    before = root @ root.T + np.eye(6)
    step, change = random.normal(size=6), random.normal(size=6)
    change *= np.sign(step @ change)
    if tau_phi:
        monkeypatch.setattr(quasi_newton, "self_scaling", lambda b, h, n: tau_phi)
    after = before.copy()
    quasi_newton.update(after, step, change, float(step @ np.linalg.solve(before, step)))
    return before, after, step, change


def test_without_scaling_the_update_is_the_textbook_bfgs(monkeypatch):
    before, after, s, y = some_update((1.0, 1.0), monkeypatch)
    left = np.eye(6) - np.outer(s, y) / (s @ y)
    assert np.allclose(after, left @ before @ left.T + np.outer(s, s) / (s @ y), rtol=1e-10)


def test_a_self_scaled_update_meets_the_secant_equation_and_stays_positive(monkeypatch):
    _, after, s, y = some_update(None, monkeypatch)
    assert np.allclose(after @ y, s) and np.linalg.eigvalsh(after).min() > 0
    assert np.allclose(after, after.T)


class Rosenbrock(quasi_newton.Surface):
    def __init__(self):
        self.calls = 0

    def both(self, point):
        from scipy.optimize import rosen, rosen_der

        self.calls += 1
        return float(rosen(point)), rosen_der(point)


def test_self_scaled_broyden_finds_the_minimum_of_rosenbrocks_function():
    surface, inverse = Rosenbrock(), np.eye(8)
    *_, last = quasi_newton.broyden_iterations(surface, np.full(8, -1.0), inverse)
    assert np.allclose(last.point, 1.0, atol=1e-5) and surface.calls < 1000


# The clock


def test_the_evaluation_of_the_error_takes_no_time(monkeypatch):
    now = 5.0

    def burn(seconds):
        nonlocal now
        now += seconds

    class Slow:
        def error(self):
            burn(0.02)
            return 1.0

    monkeypatch.setattr(time, "process_time", lambda: now)
    clock = Clock(Slow(), 0.1)
    with pytest.raises(Spent):
        while True:
            burn(0.004)
            clock.tick()
    assert clock.elapsed == pytest.approx(0.104) and now == pytest.approx(5.104 + 0.02 * len(clock.errors))
    assert len(clock.errors) > 5 and clock.times == sorted(clock.times)


def test_a_run_that_diverges_ends():
    class Broken:
        def error(self):
            return math.nan

    clock = Clock(Broken(), 1000.0)
    clock.waiting = [0.0]
    with pytest.raises(Spent):
        clock.tick()


def test_errors_are_taken_at_the_times_of_the_tables():
    assert {20.0, 60.0, 120.0} <= set(marks(120.0)) and max(marks(120.0)) == 120.0
    assert {20.0, 60.0, 120.0, 600.0} <= set(marks(600.0)) and 20 <= len(marks(600.0)) <= 24


# The store


def test_runs_that_are_there_are_not_made_again(tiny, tmp_path):
    asked = [Entry("tiny", "adam", rate, seed, 0.05) for seed in (0, 1) for rate in (0.001, 0.01)]

    def make():
        left = unfinished(asked, load(tmp_path)[0])
        jobs.sweep(left, tmp_path, 1, lambda outcome: outcome.error and pytest.fail(outcome.error))
        return left

    assert make() == asked and make() == []
    path = lines.file_of(tmp_path, "tiny", "adam")
    whole = path.read_text().splitlines()
    path.write_text("\n".join([*whole[:2], whole[2][:50], whole[3]]))
    assert load(tmp_path)[1] and make() == [asked[2]]
    assert all({"date", "versions", "hardware", "times"} <= each.keys() for each in load(tmp_path)[0])


def test_a_long_run_contains_the_short_one_unless_its_rate_is_scheduled():
    def record(method):
        return {"problem": "reaction", "method": method, "rate": 0.01, "seed": 0, "seconds": 120.0}

    def asked(method, seconds):
        return Entry("reaction", method, 0.01, 0, seconds)

    records = [record("adam"), record("adam-cosine")]
    wanted = [asked("adam", 60.0), asked("adam", 600.0), asked("adam-cosine", 60.0), asked("adam-cosine", 120.0)]
    assert unfinished(wanted, records) == [wanted[1], wanted[2]]


def test_error_maps_are_kept_beside_the_record(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBLEMS, "tiny", replace(PROBLEMS["tiny"], picture=(5, 6)))
    job = Entry("tiny", "adam", 0.01, 0, 0.05)
    jobs.sweep([job], tmp_path, 1, lambda outcome: None)
    (record,), _ = load(tmp_path)
    assert jobs.ARRAYS not in record
    with np.load(jobs.arrays_file(tmp_path, job)) as arrays:
        size = PROBLEMS["tiny"].build().size
        assert np.linalg.norm(arrays["0.05"]) / size == pytest.approx(record["errors"][-1], rel=1e-5)


# Scores and the page


def fake(problem, method, rate, seed, seconds, errors):
    """A record with errors at 20, 60 and 120 s."""
    times = [20.1, 60.2, 120.3][: len(errors)]
    return {
        "problem": problem, "method": method, "rate": rate, "seed": seed, "seconds": float(seconds), "times": times,
        "errors": errors, "losses": errors, "steps": 7, "cpu_seconds": float(seconds), "stats": {},
        "date": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.13"}, "hardware": {"cpu": "Imaginary CPU"},
    }  # fmt: skip


def study():
    records = []
    for seed, factor in ((0, 1.0), (1, 4.0)):
        for problem in ("burgers2d", "helmholtz", "fluid"):
            records += [
                fake(problem, "gauss-newton-adam", 0.001, seed, 120, [1e-4 * factor, 1e-5 * factor, 1e-6 * factor]),
                fake(problem, "adam", 0.001, seed, 120, [0.9, 0.8, 0.7]),
                fake(problem, "adam", 0.01, seed, 120, [0.5, 0.4, None]),
                fake(problem, "adam-cosine", 0.01, seed, 60, [0.6, 0.1]),
                fake(problem, "ssbroyden", None, seed, 120, [0.3, 1e-6, 1e-7]),
            ]
    records.append(fake("burgers2d", "soap", 0.01, 100, 120, [1e-9, 1e-9, 1e-9]))
    return records


def test_scores_by_hand():
    scores = Scores(study())
    adam = scores.family("burgers2d", "adam")
    assert adam == ["adam", "adam-cosine"]
    picks = {t: scores.at("burgers2d", adam, t) for t in (20, 60, 120, 600)}
    assert (picks[20].method, picks[20].rate) == ("adam", 0.01) and picks[20].mean == pytest.approx(0.5)
    assert (picks[60].method, picks[60].length) == ("adam-cosine", 60.0)
    assert picks[120].rate == 0.001 and picks[600] is None, "the other rate diverged"
    ours = scores.at("burgers2d", ["gauss-newton-adam"], 20)
    assert ours.mean == pytest.approx(2e-4) and ours.spread == pytest.approx(4)
    assert scores.ratio("burgers2d", adam, 60) == pytest.approx(2e-5 / 0.1)
    assert scores.ratio("burgers2d", scores.peers("burgers2d"), 60) == pytest.approx(20), "a loss is a loss"
    assert not scores.family("burgers2d", "soap"), "seeds for tuning are not reported"


def test_long_runs_contain_short_ones_unless_their_rate_is_scheduled():
    records = [fake("kdv", "gauss-newton-adam", 0.001, 0, 120, [0.4, 0.3, 0.2])]
    records += [
        fake("kdv", "gauss-newton-adam", 0.001, 1, 20, [0.1]),
        fake("kdv", "soap-cosine", 0.01, 0, 60, [0.5, 0.1]),
    ]
    scores = Scores(records)
    assert scores.at("kdv", ["gauss-newton-adam"], 20).errors == {0: 0.4, 1: 0.1}
    assert scores.at("kdv", ["gauss-newton-adam"], 60).errors == {0: 0.3}
    assert scores.at("kdv", ["soap-cosine"], 20) is None and scores.at("kdv", ["soap-cosine"], 60).errors == {0: 0.1}


def test_rates_with_fewer_seeds_do_not_count():
    records = [fake("kdv", "adam", 0.01, seed, 120, [0.5, 0.5, 0.5]) for seed in (0, 1)]
    records.append(fake("kdv", "adam", 0.001, 0, 120, [0.1, 0.1, 0.1]))
    assert Scores(records).at("kdv", ["adam"], 60).rate == 0.01


def test_a_diverged_run_has_no_finite_error():
    record = fake("kdv", "adam", 0.01, 0, 120, [0.5, None])
    assert error_at(record, 20) == 0.5 and error_at(record, 60) == error_at(record, 120) == math.inf


def test_the_best_rate_is_that_of_the_longest_runs():
    records = [fake("kdv", "adam", rate, 100, 120, [0.1, 0.1, last]) for rate, last in ((0.001, 0.3), (0.01, 0.2))]
    records.append(fake("kdv", "adam", 0.003, 100, 20, [1e-9]))
    assert best_rates(records) == {("kdv", "adam"): 0.01}
    asked = command.plan(["kdv"], ["adam", "soap"], [0], 60.0, best_rates(records))
    assert [job.rate for job in asked if job.method == "adam"] == [0.01]
    assert len([job for job in asked if job.method == "soap"]) == len(METHODS["soap"].rates), "nothing is known"


def test_the_page_shows_losses_as_openly_as_wins(tmp_path):
    for record in study():
        lines.append(tmp_path, record)
    for method, length in (("gauss-newton-adam-0.001", 120.0), ("adam-0.01", 120.0)):
        path = tmp_path / "burgers2d" / f"{method}-0-{length}.npz"
        jobs.write_arrays(path, {"20": np.full((101, 256), 1e-3, dtype=np.float32)})
    page, problems = build_page(tmp_path, tmp_path / "page")
    text = page.read_text()
    assert not problems and {"burgers.png", "stationary.png", "surrogates.png"} <= {
        p.name for p in page.parent.iterdir()
    }
    assert "picture.png" not in text, "there is no SOAP to draw"
    assert "| GaussNewton(Adam) | 0.001 | 2 | 7 | 2.0e-4 (4) | 2.0e-5 (4) | 2.0e-6 (4) |" in text
    assert "| Adam, cosine | 0.01 | 2 | 7 | – | 1.0e-1 (1) | – |" in text
    assert "| Burgers | 60 | 2.0e-4 | – | **2.0e1** | Adam, then self-scaled Broyden |" in text
    assert "| burgers2d, 20 s: error | 2.0e-4 | 1.0e-4 | 2.0e-5 | **no** |" in text
    assert "Imaginary CPU" in text and "--seeds 0:2" in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith(("|", "- ")))


def test_the_picture_is_drawn_from_error_maps_at_the_same_time(tmp_path):
    records = [*study(), *(fake("burgers2d", "soap", 0.01, seed, 20, [0.2]) for seed in (0, 1))]
    for record in records:
        lines.append(tmp_path, record)
    for name in ("gauss-newton-adam-0.001-0-120.0", "adam-0.01-0-120.0", "soap-0.01-0-20.0"):
        jobs.write_arrays(tmp_path / "burgers2d" / f"{name}.npz", {"20": np.full((101, 256), 1e-3, dtype=np.float32)})
    page, _ = build_page(tmp_path, tmp_path / "page")
    assert "picture.png" in page.read_text() and (page.parent / "picture.png").exists()


def test_the_command_makes_runs_and_a_page(tiny, capsys, tmp_path):
    pytest.importorskip("tyro")
    from torch_anderson.lab.cli import main

    words = ["equations", "--problems", "tiny", "--methods", "adam", "--seeds", "0", "--seconds", "0.05", "--jobs", "1"]
    words += ["--results", str(tmp_path / "runs")]
    assert main([*words, "--dry-run"]) == 0
    assert f"{len(METHODS['adam'].rates)} runs (0 done before)" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "page")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["rate"] for line in printed] == list(METHODS["adam"].rates)
    assert "| Adam |" in (tmp_path / "page" / "README.md").read_text()


@pytest.mark.parametrize(
    "words",
    [["--methods", "adma"], ["--problems", "burger"], ["--jobs", "0"], ["--seeds", "x"], ["--seconds", "0"]],
)
def test_what_cannot_be_meant_is_said_in_a_line(words, capsys, tmp_path):
    pytest.importorskip("tyro")
    from torch_anderson.lab.cli import main

    assert main(["equations", "--dry-run", "--results", str(tmp_path), *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_failing_run_does_not_stop_the_others(tiny, tmp_path, monkeypatch):
    real = race.run
    monkeypatch.setattr(race, "run", lambda entry: 1 / 0 if entry.seed == 0 else real(entry))
    outcomes = []
    jobs.sweep([Entry("tiny", "adam", 0.01, seed, 0.05) for seed in (0, 1)], tmp_path, 1, outcomes.append)
    assert [bool(outcome.error) for outcome in outcomes] == [True, False]


def test_methods_have_labels_of_their_own():
    assert len({method.label for method in METHODS.values()}) == len(METHODS)
    assert all(isinstance(method, Method) for method in METHODS.values())
