"""Made-up runs in which a claim of the paper holds, does not, or cannot be judged."""

import re
import shlex

import numpy as np
import pytest

pytest.importorskip("plotly")

from fake_runs import fake, gain, judged, limit, noisy, scattered, seeds, sweep, three_tasks, tilted, timed, windows

from experiments.claims import CLAIMS, averaging, measures, verdicts
from experiments.methods import METHODS
from experiments.results import DIVERGED
from experiments.studies import STUDIES

TRUE = {
    "admissions: Anderson": lambda: seeds() + seeds("anderson", final=0.0102),
    "admissions: average": lambda: seeds() + seeds("anderson+average", final=0.001),
    "burgers2d: Anderson": lambda: seeds(task="burgers2d") + seeds("anderson", task="burgers2d", final=0.008),
    "burgers2d: average oscillates": lambda: (
        seeds(task="burgers2d", wobble=0.01) + seeds("anderson+average", task="burgers2d", wobble=0.01, jump=0.5)
    ),
    "burgers2d: average better in the end": lambda: (
        seeds(task="burgers2d") + seeds("anderson+average", task="burgers2d", final=0.008)
    ),
    "burgers100d: Anderson": lambda: seeds(task="burgers100d") + seeds("anderson", task="burgers100d"),
    "burgers100d: average": lambda: (
        seeds("anderson", task="burgers100d") + seeds("anderson+average", task="burgers100d", wobble=0.005)
    ),
    "average: stabilises everywhere": lambda: three_tasks(anderson_average={"wobble": 0.005}),
    "average: restores the gain": lambda: three_tasks(anderson_average={"final": 0.005}),
    "batch size: oscillations fall": lambda: sweep("base", "batch_size", (10, 40, 160), lambda b: noisy(1 / b**0.5)),
    "batch size: inversely proportional": lambda: sweep("base", "batch_size", (10, 40, 160), lambda b: noisy(1 / b)),
    "batch size: noise hinders Anderson": lambda: gain(10) + gain(40) + gain(160),
    "collinearity: period": lambda: sweep(
        "anderson", "period", (1, 5, 20), lambda p: {"stats": {"condition_number": 1e4 / p}}
    ),
    "collinearity: store period": lambda: sweep(
        "anderson", "store_period", (1, 5, 20), lambda q: {"stats": {"condition_number": 1e4 / q}}, period=20
    ),
    "period: less often is more stable": lambda: sweep(
        "anderson", "period", (1, 5), lambda p: {"final": 0.05 / p}, relaxation=1.0
    ),
    "safeguard: does no harm": lambda: seeds() + seeds("anderson") + seeds("anderson", safeguard=None, final=1.0),
    "period: infinite is the base": lambda: [
        run for method in ("base", "anderson") for run in limit(method, 0.25, period=10**6, store_period=10**6)
    ],
    "average: lowers the variance": lambda: windows(lambda t: noisy(0.1 / t), wobble=0.1),
    "average: variance formula": lambda: windows(lambda t: noisy(0.1 * averaging.variance_ratio(t) ** 0.5), wobble=0.1),
    "average: larger t, less variance": lambda: windows(lambda t: noisy(0.1 / t), wobble=0.1),
    "average: larger t, slower": lambda: windows(lambda t: {"speed": 1 / t}),
    "criterion: larger epsilon, fewer averages": lambda: sweep(
        "anderson+average", "average_tolerance", (0.1, 1.0, 10.0), lambda e: {"stats": {"averaged": 50 / e}}
    ),
    "criterion: only where needed": lambda: sweep(
        "anderson+average", "batch_size", (40, 400), lambda b: {"stats": {"averaged": 40_000 // b}}
    ),
    "cost: formula": lambda: timed(lambda m, p: 0.1 * m**2 / p),
    "cost: larger p": lambda: timed(lambda m, p: 0.1 * m**2 / p),
    "cost: p of order m² restores it": lambda: timed(lambda m, p: 0.01 * m**2 / p),
}

FALSE = {
    "admissions: Anderson": lambda: seeds() + seeds("anderson", final=0.02),
    "admissions: average": lambda: seeds() + seeds("anderson+average", final=0.006),
    "burgers2d: Anderson": lambda: seeds(task="burgers2d") + seeds("anderson", task="burgers2d", final=0.011),
    "burgers2d: average oscillates": lambda: (
        seeds(task="burgers2d", jump=0.5) + seeds("anderson+average", task="burgers2d", jump=0.1)
    ),
    "burgers2d: average better in the end": lambda: (
        seeds(task="burgers2d") + seeds("anderson+average", task="burgers2d", final=0.02)
    ),
    "burgers100d: Anderson": lambda: seeds(task="burgers100d") + seeds("anderson", task="burgers100d", final=0.001),
    "burgers100d: average": lambda: (
        seeds("anderson", task="burgers100d") + seeds("anderson+average", task="burgers100d", wobble=0.5)
    ),
    "average: stabilises everywhere": lambda: three_tasks(anderson_average={"wobble": 0.5}),
    "average: restores the gain": lambda: three_tasks(anderson_average={"final": 0.02}),
    "batch size: oscillations fall": lambda: sweep("base", "batch_size", (10, 40, 160), lambda b: noisy(b / 1000)),
    "batch size: inversely proportional": lambda: sweep(
        "base", "batch_size", (10, 40, 160), lambda b: noisy(1 / b**0.5)
    ),
    "batch size: noise hinders Anderson": lambda: (
        sweep("base", "batch_size", (10, 40), lambda b: {})
        + sweep("anderson", "batch_size", (10, 40), lambda b: {}, period=10)
    ),
    "collinearity: period": lambda: sweep("anderson", "period", (1, 5), lambda p: {"stats": {"condition_number": 9.0}}),
    "collinearity: store period": lambda: sweep(
        "anderson", "store_period", (1, 5), lambda q: {"stats": {"condition_number": 9.0 * q}}, period=20
    ),
    "period: less often is more stable": lambda: sweep(
        "anderson", "period", (1, 5), lambda p: {"final": 0.01 * p}, relaxation=1.0
    ),
    "safeguard: does no harm": lambda: seeds() + seeds("anderson") + seeds("anderson", relaxation=1.0, final=0.02),
    "period: infinite is the base": lambda: [
        *limit("base", 0.25), *limit("anderson", 0.25 + 1e-16, period=10**6, store_period=10**6)[1:],
        *limit("anderson", 0.25 + 1e-15, period=10**6, store_period=10**6)[:1],
    ],
    "average: lowers the variance": lambda: windows(lambda t: noisy(0.01 * t)),
    "average: variance formula": lambda: windows(lambda t: noisy(0.1 / t), wobble=0.1),
    "average: larger t, less variance": lambda: windows(lambda t: noisy(0.01 * t)),
    "average: larger t, slower": lambda: windows(lambda t: {}),
    "criterion: larger epsilon, fewer averages": lambda: sweep(
        "anderson+average", "average_tolerance", (0.1, 1.0), lambda e: {"stats": {"averaged": 990}}
    ),
    "criterion: only where needed": lambda: sweep(
        "anderson+average", "batch_size", (40, 400), lambda b: {"stats": {"averaged": 990}}
    ),
    "cost: formula": lambda: timed(lambda m, p: 0.01 * m**3 / p),
    "cost: larger p": lambda: timed(lambda m, p: 1.0),
    "cost: p of order m² restores it": lambda: timed(lambda m, p: 0.5),
}  # fmt: skip


OPEN = {
    "admissions: Anderson": lambda: seeds() + scattered("anderson", 1.0),
    "admissions: average": lambda: seeds() + scattered("anderson+average", 0.3),
    "burgers2d: Anderson": lambda: seeds(task="burgers2d") + scattered("anderson", 0.9, task="burgers2d"),
    "burgers2d: average oscillates": lambda: seeds(task="burgers2d") + seeds("anderson+average", task="burgers2d"),
    "burgers100d: Anderson": lambda: seeds(task="burgers100d") + scattered("anderson", 0.8, task="burgers100d"),
    "average: restores the gain": lambda: three_tasks(),
    "batch size: inversely proportional": lambda: tilted(
        "base", "batch_size", (10, 40, 160), lambda b, tilt: noisy(b ** (tilt - 0.75))
    ),
    "batch size: oscillations fall": lambda: tilted(
        "base", "batch_size", (10, 40, 160), lambda b, tilt: noisy(0.05 * b**tilt)
    ),
    "period: less often is more stable": lambda: tilted(
        "anderson", "period", (1, 5), lambda p, tilt: {"final": 0.01 * p**tilt, "relaxation": 1.0}
    ),
    "safeguard: does no harm": lambda: seeds() + scattered("anderson", 1.0),
    "average: lowers the variance": lambda: windows(lambda t: {}),
    "average: variance formula": lambda: windows(lambda t: noisy(0.05 * (2 * averaging.variance_ratio(t)) ** 0.5)),
}


@pytest.mark.parametrize("name", TRUE)
def test_a_claim_that_holds_is_reproduced(name):
    verdict = judged(name, TRUE[name]())
    assert verdict.verdict == "reproduced", verdict.numbers
    assert "nan" not in verdict.numbers


@pytest.mark.parametrize("name", FALSE)
def test_a_claim_that_does_not_hold_is_not_reproduced(name):
    verdict = judged(name, FALSE[name]())
    assert verdict.outcome == "not reproduced", verdict.numbers
    assert "Reproduced if" in verdict.numbers or "reproduced if" in verdict.numbers


@pytest.mark.parametrize("name", OPEN)
def test_a_claim_that_the_intervals_leave_open_is_called_inconclusive(name):
    verdict = judged(name, OPEN[name]())
    assert verdict.outcome == "not reproduced (inconclusive)", verdict.numbers
    assert verdict.numbers.startswith("Inconclusive: ")


def test_every_claim_but_imagenet_is_tried_both_ways():
    names = {claim.name for claim in CLAIMS if not claim.name.startswith("imagenet")}
    assert names == TRUE.keys() == FALSE.keys()
    assert len(names) == len(CLAIMS) - 2


def test_without_runs_nothing_is_decided_and_each_claim_says_what_to_run():
    for verdict in verdicts([]):
        assert verdict.verdict == "cannot be tested" and verdict.figure is None
        commands = re.findall("`(.+?)`", verdict.numbers)
        assert commands or verdict.name.startswith("imagenet")
        for command in commands:
            assert_known(shlex.split(command))


def assert_known(words):
    """The command names things that exist."""
    *program, verb, name = words[:5]
    rest = words[5:]
    assert program == ["python", "-m", "experiments"]
    if verb == "study":
        assert name in STUDIES and not rest
    else:
        assert verb == "run" and set(rest[rest.index("--method") + 1 : rest.index("--seeds")]) <= METHODS.keys()


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_and_its_commands_name_the_same_runs(name):
    tyro = pytest.importorskip("tyro")
    from experiments.cli import Run as Command

    parsed = [tyro.cli(Command, args=shlex.split(command)[4:]) for command in STUDIES[name].commands()]
    commanded = {spec for command in parsed for spec in map(identity, command.plan(()))}
    assert commanded == set(map(identity, STUDIES[name].specs()))


def identity(spec):
    return spec.task, spec.variant, spec.seed, spec.profile


def test_every_run_of_the_studies_has_settings_that_exist():
    for study in STUDIES.values():
        for spec in study.specs():
            spec.resolve()


def test_all_claims_are_judged_together_and_in_the_order_of_the_table():
    runs = [run for name in TRUE for run in TRUE[name]()]
    assert [verdict.name for verdict in verdicts(runs)] == [claim.name for claim in CLAIMS]


def test_two_seeds_decide_nothing():
    assert judged("admissions: Anderson", seeds(count=2) + seeds("anderson", count=2)).verdict == "cannot be tested"


def test_the_quick_profile_is_shown_but_decides_nothing():
    verdict = judged("admissions: Anderson", seeds(profile="quick") + seeds("anderson", profile="quick"))
    assert verdict.verdict == "cannot be tested" and "quick profile" in verdict.numbers and "Ratio" in verdict.numbers


def test_runs_with_changed_settings_do_not_count_for_the_paper_figures():
    changed = seeds(overrides={"width": 8}) + seeds("anderson", overrides={"width": 8})
    assert judged("admissions: Anderson", changed).verdict == "cannot be tested"


def test_the_activation_of_the_paper_is_shown_where_it_was_run():
    runs = seeds(task="burgers2d") + seeds("anderson", task="burgers2d", final=0.02)
    assert "relu" not in judged("burgers2d: Anderson", runs).numbers
    relu = {"task": "burgers2d", "overrides": {"activation": "relu"}, "activation": "relu"}
    verdict = judged("burgers2d: Anderson", runs + seeds(**relu) + seeds("anderson", final=0.001, **relu))
    assert verdict.verdict == "not reproduced" and re.search("with activation=relu: 0.(1|09)", verdict.numbers)


def test_a_diverged_run_counts_as_worst_and_is_named():
    runs = seeds() + seeds("anderson", count=4, final=0.01) + [fake("anderson", 4, status=DIVERGED)]
    verdict = judged("admissions: Anderson", runs)
    assert verdict.verdict == "not reproduced"
    assert "1 diverged" in verdict.numbers and "5 seeds" in verdict.numbers


def test_a_run_that_went_astray_without_diverging_is_seen():
    runs = seeds() + seeds("anderson", count=4, final=0.009) + [fake("anderson", 4, final=10.0)]
    assert re.search(
        r"5 seeds\), below 1 on 4, at most (9\d\d|1e\+03|1\.0\de\+03)", judged("admissions: Anderson", runs).numbers
    )


def test_the_control_is_named_where_it_does_as_well():
    runs = seeds() + seeds("anderson+average", final=0.001) + seeds("matched-anderson+average", final=0.001)
    assert "the learning rate alone may explain" in judged("admissions: average", runs).numbers
    runs = seeds() + seeds("anderson+average", final=0.001) + seeds("matched-anderson+average", final=0.01)
    assert "is better than that control" in judged("admissions: average", runs).numbers


def test_the_control_of_both_is_that_of_the_average_where_jumps_are_full():
    runs = [
        run for method in ("base", "anderson+average", "matched-average") for run in seeds(method, task="burgers2d")
    ]
    numbers = judged("burgers2d: average better in the end", runs).numbers
    assert "anderson+average to matched-average" in numbers and "may explain" in numbers
    on_admissions = seeds() + seeds("anderson+average") + seeds("matched-average")
    assert (
        "control (base at the equivalent learning rate) was not run"
        in judged("admissions: average", on_admissions).numbers
    )


def test_a_task_without_validation_mse_says_nothing_about_harm():
    runs = TRUE["safeguard: does no harm"]() + seeds() + seeds("anderson", width=8) + seeds(width=8)
    for run in runs[-10:]:
        run.summary["final"] = {"validation_loss": 0.1}
    verdict = judged("safeguard: does no harm", runs)
    assert "Harm in 0 of 1 settings" in verdict.numbers and "diverged" not in verdict.numbers


def test_a_diverged_run_with_a_ratio_to_base_of_its_own_is_named():
    runs = gain(10) + gain(40) + gain(160)
    place = next(i for i, run in enumerate(runs) if run.config["method"] == "anderson")
    runs[place] = fake("anderson", 0, batch_size=10, period=10, status=DIVERGED)
    assert "1 diverged" in judged("batch size: noise hinders Anderson", runs).numbers


def test_histories_are_full_when_the_cost_study_takes_its_time():
    for spec in STUDIES["cost"].specs():
        task = spec.resolve()
        assert (task.history_size + 1) * task.store_period <= measures.TAIL * task.steps


def test_figures_have_lines_of_equal_length():
    for name in TRUE:
        figure = judged(name, TRUE[name]()).figure
        for x, y in figure.series.values() if figure else ():
            assert len(x) == len(y) > 1 and np.isfinite([*x, *y]).all()
