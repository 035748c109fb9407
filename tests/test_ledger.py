"""What the ledger decides, worked out by hand."""

from math import e, isnan

import pytest

from torch_anderson.ledger import LEAST_SHARE, LESS, MORE, MOST, SMOOTHING, Ledger


def test_a_jump_is_booked_with_the_next_and_the_wait_keeps_to_the_share():
    ledger = Ledger.opened(0.3, 10)
    assert ledger.wait == 10
    ledger.enter(cost=20.0, before=e**2, after=1.0, steps=10, period=10)
    assert (ledger.jump_rate, ledger.base_rate) == (0, 0)
    assert ledger.share == pytest.approx(0.3 * MORE)
    # 20 of 20 + wait units are the accelerations': at most the share, and with one step less it would be more.
    assert 20 / (20 + ledger.wait) <= ledger.share < 20 / (20 + ledger.wait - 1)
    ledger.enter(cost=5.0, before=1 / e, after=1 / e**2, steps=8, period=10)
    assert ledger.jump_rate == pytest.approx((1 - SMOOTHING) * 2 / 20)
    assert ledger.base_rate == pytest.approx((1 - SMOOTHING) * 1 / 8)


def test_what_is_lost_after_a_jump_is_taken_from_its_gain():
    ledger = Ledger.opened(0.3, 10)
    ledger.enter(cost=20.0, before=e**2, after=1.0, steps=10, period=10)
    ledger.enter(cost=20.0, before=e**3, after=1.0, steps=10, period=10)
    assert ledger.jump_rate == pytest.approx((1 - SMOOTHING) * (2 - 3) / 20)
    assert ledger.base_rate == 0
    assert ledger.share == pytest.approx(0.3 * MORE / LESS)


def test_what_gains_nothing_gets_a_smaller_share():
    ledger = Ledger.opened(0.3, 10)
    ledger.enter(cost=20.0, before=1.0, after=1.0, steps=10, period=10)
    assert ledger.share == pytest.approx(0.3 / LESS)


@pytest.mark.parametrize(("falls", "share"), [(1.0, LEAST_SHARE), (0.5, MOST * 0.3)])
def test_the_share_stays_within_its_bounds_and_the_period_is_kept(falls, share):
    ledger, loss = Ledger.opened(0.3, 10), 1.0
    for _ in range(50):
        ledger.enter(cost=1.0, before=loss, after=loss * falls, steps=10, period=10)
        loss *= falls
        assert ledger.wait >= 10
    assert ledger.share == pytest.approx(share)


def test_losses_may_be_negative():
    ledger, loss = Ledger.opened(0.3, 10), -1.0
    for _ in range(20):
        ledger.enter(cost=1.0, before=loss, after=loss - 0.5, steps=10, period=10)
        loss -= 0.5
    assert ledger.share == pytest.approx(MOST * 0.3)


def test_what_comes_to_nothing_is_tried_less_and_less_often_but_not_never():
    ledger = Ledger.opened(0.3, 10)
    ledger.enter(cost=1.0, before=2.0, after=1.0, steps=10, period=10)
    waits = []
    for _ in range(20):
        ledger.postpone(10)
        waits.append(ledger.wait)
    assert waits[0] == 20
    assert waits[-1] == 10 / LEAST_SHARE
    assert isnan(ledger.loss)


def test_it_comes_back_from_a_checkpoint():
    ledger = Ledger.opened(0.3, 10)
    ledger.enter(cost=20.0, before=2.0, after=1.0, steps=10, period=10)
    assert Ledger.from_numbers(ledger.numbers()) == ledger
