"""What the ledger decides, worked out by hand."""

import pytest

from torch_anderson.ledger import LEAST_SHARE, LESS, MORE, MOST, SMOOTHING, Ledger


def test_a_gain_is_booked_by_cost_and_the_wait_keeps_to_the_share():
    ledger = Ledger.opened(0.3, 10)
    assert ledger.wait == 10
    ledger.enter(cost=20.0, gain=2.0, base_gain=0.1, steps=10, period=10)
    assert ledger.jump_rate == pytest.approx((1 - SMOOTHING) * 2 / 20)
    assert ledger.base_rate == pytest.approx((1 - SMOOTHING) * 0.1 / 10)
    assert ledger.share == pytest.approx(0.3 * MORE)
    # 20 of 20 + wait units are the accelerations': at most the share, and with one step less it would be more.
    assert 20 / (20 + ledger.wait) <= ledger.share < 20 / (20 + ledger.wait - 1)


def test_what_gains_nothing_or_less_than_base_steps_gets_a_smaller_share():
    for gain, base_gain in ((0.0, -1.0), (0.1, 9.0)):
        ledger = Ledger.opened(0.3, 10)
        ledger.enter(cost=20.0, gain=gain, base_gain=base_gain, steps=10, period=10)
        assert ledger.share == pytest.approx(0.3 / LESS)


@pytest.mark.parametrize(("gain", "share"), [(0.0, LEAST_SHARE), (1.0, MOST * 0.3)])
def test_the_share_stays_within_its_bounds_and_the_period_is_kept(gain, share):
    ledger = Ledger.opened(0.3, 10)
    for _ in range(50):
        ledger.enter(cost=1.0, gain=gain, base_gain=0.1, steps=10, period=10)
        assert ledger.wait >= 10
    assert ledger.share == pytest.approx(share)


def test_it_comes_back_from_a_checkpoint():
    ledger = Ledger.opened(0.3, 10)
    ledger.enter(cost=20.0, gain=2.0, base_gain=0.1, steps=10, period=10)
    assert Ledger.from_numbers(0.3, ledger.numbers()) == ledger
