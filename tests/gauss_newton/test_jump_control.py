"""Damping, width and ledger, worked out by hand."""

from math import e

import pytest
import torch

from torch_anderson._gauss_newton.control import (
    LEAST_DAMPING,
    LEAST_SHARE,
    LESS,
    MORE,
    MOST,
    MOST_DAMPING,
    SMOOTHING,
    adapt_width,
    book,
    next_damping,
    postpone,
)
from torch_anderson._gauss_newton.solve import LinearModel, quadratic
from torch_anderson._gauss_newton.state import FEWEST, HISTORY, GaussNewtonState
from torch_anderson._tensors.checkpoint import pack, unpack

BUDGET = 0.3


def booked(state, cost, before, after, steps=10):
    state.since_jump = steps
    book(state, BUDGET, cost, before, after)


def test_damping_follows_how_well_the_promise_was_kept():
    kept, middling, poor, broken = (next_damping(0.1, 1.0, fall) for fall in (1.0, 0.5, 0.01, -1.0))
    assert kept < 0.1 == middling < poor < broken
    assert next_damping(0.1, 1.0, float("nan")) == broken
    assert next_damping(LEAST_DAMPING, 1.0, 1.0) == LEAST_DAMPING
    assert next_damping(MOST_DAMPING, 1.0, -1.0) == MOST_DAMPING


def model_of_columns(columns, ages):
    values = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    columns = torch.tensor(columns, dtype=torch.float64)
    here = quadratic(None, values, columns)
    return LinearModel(None, values, columns, here, 4.0, lambda x: x, ages)


ALL, HALF, NOTHING = [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0]
"""A column that explains the outputs, half of them, or nothing."""


@pytest.mark.parametrize(
    ("columns", "width"),
    [
        ([NOTHING, ALL, NOTHING, NOTHING, NOTHING], FEWEST),  # the newest difference explains all
        ([ALL, NOTHING, NOTHING, NOTHING, NOTHING], FEWEST),  # the step does
        ([NOTHING, NOTHING, NOTHING, NOTHING, ALL], 8),  # the oldest difference does
        ([[2.0, 2.0, 2.0, 0.0], NOTHING, NOTHING, ALL, NOTHING], 4),  # three quarters without the older half
    ],
)
def test_the_width_halves_or_doubles_by_what_the_newer_differences_promise(columns, width):
    state = GaussNewtonState(share=BUDGET, width=4, damping=1e-9)
    adapt_width(state, model_of_columns(columns, [1, 2, 3, 4]))
    assert state.width == width


def test_the_width_stays_within_the_history():
    state = GaussNewtonState(share=BUDGET, width=HISTORY, damping=1e-9)
    adapt_width(state, model_of_columns([NOTHING, NOTHING, ALL], [1, 2]))
    assert state.width == HISTORY


def test_a_jump_is_booked_with_the_next_and_the_wait_keeps_to_the_share():
    state = GaussNewtonState(share=BUDGET)
    assert state.wait == 10
    booked(state, cost=20.0, before=e**2, after=1.0)
    assert (state.jump_rate, state.base_rate) == (0, 0)
    assert state.share == pytest.approx(BUDGET * MORE)
    # 20 of 20 + wait units are those of jumps: at most the share, and with one step less it would be more.
    assert 20 / (20 + state.wait) <= state.share < 20 / (20 + state.wait - 1)
    booked(state, cost=5.0, before=1 / e, after=1 / e**2, steps=8)
    assert state.jump_rate == pytest.approx((1 - SMOOTHING) * 2 / 20)
    assert state.base_rate == pytest.approx((1 - SMOOTHING) * 1 / 8)


def test_what_is_lost_after_a_jump_is_taken_from_its_gain():
    state = GaussNewtonState(share=BUDGET)
    booked(state, cost=20.0, before=e**2, after=1.0)
    booked(state, cost=20.0, before=e**3, after=1.0)
    assert state.jump_rate == pytest.approx((1 - SMOOTHING) * (2 - 3) / 20)
    assert state.base_rate == 0
    assert state.share == pytest.approx(BUDGET * MORE / LESS)


def test_what_gains_nothing_gets_a_smaller_share():
    state = GaussNewtonState(share=BUDGET)
    booked(state, cost=20.0, before=1.0, after=1.0)
    assert state.share == pytest.approx(BUDGET / LESS)


@pytest.mark.parametrize(("falls", "share"), [(1.0, LEAST_SHARE), (0.5, MOST * BUDGET)])
def test_the_share_stays_within_its_bounds_and_the_period_is_kept(falls, share):
    state, loss = GaussNewtonState(share=BUDGET), 1.0
    for _ in range(50):
        booked(state, cost=1.0, before=loss, after=loss * falls)
        loss *= falls
        assert state.wait >= 10
    assert state.share == pytest.approx(share)


def test_losses_may_be_negative():
    state, loss = GaussNewtonState(share=BUDGET), -1.0
    for _ in range(20):
        booked(state, cost=1.0, before=loss, after=loss - 0.5)
        loss -= 0.5
    assert state.share == pytest.approx(MOST * BUDGET)


def test_what_comes_to_nothing_is_tried_less_and_less_often_but_not_never():
    state = GaussNewtonState(share=BUDGET)
    booked(state, cost=1.0, before=2.0, after=1.0)
    waits = []
    for _ in range(20):
        postpone(state)
        waits.append(state.wait)
    assert waits[0] == 20
    assert waits[-1] == 10 / LEAST_SHARE
    assert state.loss is None and state.suspicious


@pytest.mark.parametrize("loss", [None, 1.5])
def test_all_numbers_come_back_from_a_checkpoint(loss):
    state = GaussNewtonState(0.25, 7, 3, False, 4, 2, 8, 1e-4, 12, 0.5, 0.125, loss, 0.75, 9.0)
    assert unpack(GaussNewtonState, pack(state, 2)) == state
