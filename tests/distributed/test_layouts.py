"""Every layout trains as a single process does: the same weights to 1e-12, the same decisions, replicas bit for bit."""

from collections.abc import Iterable
from functools import cache

import pytest
from cases import CASES, ELEMENTWISE, GRADIENTS, MORE_NETWORK, NETWORK, build, disturbed
from layouts import ALL, LAYOUTS, Training, assert_bitwise_equal, distance, in_time
from processes import run
from reference import TextbookAnderson

from torch_anderson._anderson.step import MOST_GAIN

TOLERANCE = 1e-12
MANY = [layout for layout in LAYOUTS if layout != "single"]
COMBINED = ("hsdp", "fsdp x tp", "ddp, history sharded")
"""Combinations of layouts that are tried with every case. They get every other one, as their steps take long."""


@cache
def alone(name: str) -> Training:
    """The same in a single process."""
    return build(name).advance()


def cases_for(layout: str, cases: Iterable[str]) -> list[str]:
    return list(cases)[:: 2 if layout in COMBINED else 1]


def outcomes(layout: str, cases: Iterable[str]) -> dict[str, dict]:
    found = {}
    for name in cases:
        try:
            found[name] = build(name, layout).advance().outcome()
        except BaseException as problem:
            problem.add_note(f"layout {layout!r}, case {name!r}")
            raise
    return found


def assert_as_alone(layout: str, cases: Iterable[str]) -> None:
    first, *others = run(ALL[layout].ranks, outcomes, layout, cases)
    for other in others:
        for name in cases:
            assert other[name]["counts"] == first[name]["counts"], name
            assert_bitwise_equal(other[name]["weights"], first[name]["weights"])
    apart = {name: distance(first[name]["weights"], alone(name).weights()) for name in cases}
    assert not {name: far for name, far in apart.items() if not far <= TOLERANCE}
    for name in cases:
        assert first[name]["counts"] == alone(name).counts(), name


@pytest.mark.parametrize("layout", [in_time(layout, "ddp") for layout in (*MANY, "ddp on 2, history sharded")])
def test_weights_end_where_those_of_a_single_process_do(layout):
    assert_as_alone(layout, cases_for(layout, ELEMENTWISE))


@pytest.mark.parametrize("layout", [in_time(layout, "ddp") for layout in (*MANY, "ddp on 2, history sharded")])
def test_jumps_by_gradients_end_where_those_of_a_single_process_do(layout):
    assert_as_alone(layout, GRADIENTS)


@pytest.mark.parametrize("layout", [in_time(layout, "ddp", "fsdp on 2") for layout in (*MANY, "fsdp on 2")])
def test_networks_end_where_those_of_a_single_process_do(layout):
    assert_as_alone(layout, cases_for(layout, NETWORK))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "ddp on 2, history sharded", "fsdp on 2"])
def test_more_networks_end_where_those_of_a_single_process_do(layout):
    assert_as_alone(layout, MORE_NETWORK)


# ---------------------------------------------------------------------------------- whether that means anything


@pytest.mark.parametrize("name", CASES)
def test_cases_accelerate_20_times_and_do_not_amplify_rounding(name):
    counts = alone(name).counts()
    assert counts["attempted"] + counts.get("skipped_no_gain", 0) >= (3 if name in GRADIENTS else 20)
    assert counts["accepted"] >= (3 if name in GRADIENTS else 5)
    assert counts.get("averaged", 5) >= 5
    assert distance(disturbed(name).advance().weights(), alone(name).weights()) <= TOLERANCE / 2


@pytest.mark.parametrize("name", [name for name in CASES if name not in GRADIENTS])
def test_a_single_process_follows_the_textbook_in_these_cases(name):
    training = build(name)
    base = training.optimizer.base
    options = {option: value for option, value in CASES[name].options.items() if option != "residual"}
    training.optimizer = TextbookAnderson(base, **options, max_gain=MOST_GAIN)
    training.optimizer.param_groups, training.optimizer.zero_grad = base.param_groups, base.zero_grad
    training.advance()
    assert distance(alone(name).weights(), training.weights()) <= 1e-9


def test_some_jumps_are_too_long():
    """Their length is measured by a path that all ranks have a part of."""
    assert alone("short jumps").counts()["rejected_too_long"] >= 3


def test_shapes_are_awkward():
    """Dimensions that 2 and 4 ranks cannot share evenly, fewer rows than ranks, and a scalar."""
    assert {p.shape[:1] for p in build("loss").net.parameters()} == {(7,), (3,), (1,), ()}
    assert {LAYOUTS[layout].ranks for layout in MANY} == {2, 4}
