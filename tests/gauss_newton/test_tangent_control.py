"""The control of tangent jumps: damping, rows, the search, and who makes the next step, against what the docs say."""

import pytest
import scipy.optimize
import torch
from test_tangent_jumps import One, fitted_one, measured
from torch import nn
from torch.optim import SGD

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton import jump
from torch_anderson._gauss_newton.control import State
from torch_anderson._gauss_newton.jacobian import Memory
from torch_anderson._gauss_newton.losses import Convex

ONES = torch.ones(6, 1, dtype=torch.float64)


def straight(step):
    """A curve of one weight without corrections."""
    zero = torch.zeros(1).double()
    return jump.Curve(torch.tensor([step]).double(), zero, zero, promised=0.0)


def test_damping_is_a_thousandth_of_the_loss_for_each_block_and_more_where_all_samples_are_fitted():
    state = State()
    assert state.damping(2.0, 1e3, all_fitted=False) == pytest.approx(0.002)
    assert state.damping(2.0, 1e3, all_fitted=True) == pytest.approx(0.1)
    state.blocks = 3.2
    assert state.damping(2.0, 1e3, all_fitted=False) == pytest.approx(0.006)


def test_damping_is_at_most_a_hundredth_of_the_trace_unless_jumps_are_refused():
    state = State()
    assert state.damping(2.0, 0.5, all_fitted=True) == pytest.approx(0.005)
    state.refuse()
    assert state.damping(2.0, 0.5, all_fitted=True) == pytest.approx(0.015)


def test_refused_jumps_triple_the_damping_and_halve_the_length_and_accepted_ones_undo_it():
    state = State(length=0.5)
    state.refuse()
    state.refuse()
    assert state.damping(1.0, 1e3, all_fitted=False) == pytest.approx(0.009) and state.length == 0.125
    state.accept(0.4, longer=True)
    assert state.damping(1.0, 1e3, all_fitted=False) == pytest.approx(0.003) and state.length == 0.4
    for _ in range(3):
        state.accept(0.4, longer=True)
    assert state.damping(1.0, 1e3, all_fitted=False) == pytest.approx(0.001)
    for _ in range(40):
        state.refuse()
    assert state.damping(1.0, 1e3, all_fitted=False) == pytest.approx(1e3) and state.length == 1 / 256


@pytest.mark.parametrize("gap, factor", [(0.55, 1.04), (0.65, 1.0), (0.8, 1 / 1.04)])
def test_rows_follow_how_much_the_loss_falls_on_samples_that_were_not_fitted(gap, factor):
    state = State(jumps=10, blocks=2.0)
    state.adapt_rows(fitted=1.0, unseen=gap, most=9.0)
    assert state.blocks == pytest.approx(2 * factor)
    early = State(jumps=9, blocks=2.0)
    early.adapt_rows(fitted=1.0, unseen=gap, most=9.0)
    assert early.blocks == 2.0


def test_rows_stay_within_their_limits():
    state = State(jumps=10, blocks=2.0)
    for _ in range(50):
        state.adapt_rows(fitted=1.0, unseen=0.0, most=4.0)
    assert state.blocks == 4.0
    for _ in range(200):
        state.adapt_rows(fitted=1.0, unseen=1.0, most=4.0)
    assert state.blocks == 1.0


@pytest.mark.parametrize("samples", [1, 2])
def test_the_second_order_is_the_same_from_one_evaluation_and_from_two(samples):
    """With one sample all are fitted. r = (w, w + c w^2 - 1) has no third derivative, so that both are exact."""
    c, w, damping = 0.7, 0.5, 0.1
    curve = fitted_one(lambda u, x: (u(x), u(x) + c * u(x) ** 2 - 1), w, damping, 0.5, samples)
    slope = 1 + 2 * c * w
    normal = 1 + slope**2 + damping
    step = (w + slope * (w + c * w**2 - 1)) / normal
    assert float(curve.second_order) == pytest.approx(slope * 2 * c * step**2 / normal)


def test_corrections_are_at_most_three_quarters_and_half_as_long_as_the_jump():
    length = 0.4
    curve = fitted_one(lambda u, x: u(x) + 30 * u(x) ** 2 + 200 * u(x) ** 3 - 5, 0.1, 0.0, length)
    size = float(curve.jump.norm())
    assert length / 2 * float(curve.second_order.norm()) == pytest.approx(0.75 * size)
    assert length**2 / 6 * float(curve.third_order.norm()) == pytest.approx(0.5 * size)


@pytest.mark.parametrize("loss", [None, lambda z: (z.square() / 2 + z.square().square() / 24).sum()])
def test_the_expected_minimum_of_outputs_on_parabolas_is_that_of_scipy(loss):
    model = measured(One(0.9), lambda u, x: 3 * u(x) ** 2 + u(x) - 1.3, loss, ONES, fitted=2, weight=1.0)
    search = jump.Search(model, straight(0.8))
    found = search.minimum(search.try_length(0.125), search.try_length(0.0625))

    def true_loss(a):
        z = torch.tensor(3 * (0.9 - a * 0.8) ** 2 + (0.9 - a * 0.8) - 1.3)
        return float(z.square() if loss is None else loss(z))

    expected = scipy.optimize.minimize_scalar(true_loss, bounds=(0.0, 1.0), method="bounded").x
    assert found == pytest.approx(expected, rel=0.02)  # of a grid


def test_the_search_finds_the_minimum_of_a_linear_model_and_shortens_jumps_that_are_far_too_long():
    model = measured(One(0.9), lambda u, x: u(x) - 0.4, None, ONES, fitted=2, weight=1.0)
    search = jump.Search(model, straight(0.5))
    search.run(0.125, longer=True)
    assert search.best.length == 1.0 and search.best.loss == pytest.approx(0.0)
    search = jump.Search(model, straight(50.0))
    search.run(1.0, longer=False)
    assert search.falls and search.best.loss < model.loss and search.best.length <= 0.02


def test_a_loss_without_curvature_counts_as_the_parabola_that_falls_to_zero():
    """|z| at 3: slope 1 and loss 3, so that r^2 = 3, and the gradient of |r + L z|^2 is 1."""
    loss = Convex(lambda z: z.abs().sum(), torch.Size([1]), ())
    r, roots = loss.expand(torch.tensor([[3.0]], dtype=torch.float64))
    assert float(r.square()) == pytest.approx(3.0)
    assert float(2 * roots[0, 0, 0] * r[0, 0]) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------ who makes the next step


class Counting(SGD):
    made = 0

    def step(self, closure=None):
        self.made += 1
        return super().step(closure)


def test_the_base_makes_one_step_before_jumps_4_16_and_64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    data = torch.rand(30, 1).double(), torch.randn(30).double()
    objective = Objective(model, fit=Term(lambda u, x, y: u(x) - y, data))
    base = Counting(model.parameters(), lr=1e-6)
    optimizer, before = GaussNewton(base), []
    while optimizer.stats.counts["attempted"] < 70:
        steps = base.made
        optimizer.step(objective)
        before += [optimizer.stats.counts["attempted"]] * (base.made - steps)
    assert before == [4, 16, 64]


@pytest.mark.parametrize("growth, undone", [(1.5, False), (3.0, True)])
def test_base_steps_that_more_than_double_the_loss_are_undone(growth, undone, monkeypatch):
    """The loss is (w - 3)^2; two steps uphill with rate lr multiply it by (1 + 2 lr)^4."""
    model = One(0.0)
    objective = Objective(model, fit=Term(lambda u, x: u(x) - 3, ONES))
    rate = (growth**0.25 - 1) / 2
    optimizer = GaussNewton(SGD(model.parameters(), lr=rate, maximize=True))
    optimizer.step(objective)
    after = (float(model.w) - 3) ** 2
    monkeypatch.setattr(State, "compares", False)
    optimizer._driver.state.wait = 2
    starts = []
    optimizer.register_acceleration_hook(lambda record: starts.append(record.residual_norm**2))
    for _ in range(3):
        optimizer.step(objective)
    assert starts == [pytest.approx(after * (1 if undone else growth))]


def test_jumps_go_on_while_they_gain_a_fifth_of_what_base_steps_gain():
    state = State(base_rate=1.0, jump_rate=0.21)
    state.record_jump_gain(0.21, cost=1.0)
    assert state.wait == 0
    state = State(base_rate=1.0, jump_rate=0.19)
    state.record_jump_gain(0.19 * 2.1, cost=2.1)
    assert state.share == pytest.approx(0.2) and state.wait == 9  # 2.1 (1 - 0.2) / 0.2, rounded up


def test_a_fit_without_damping_floor_stays_finite():
    """Two equal rows: the matrix of products is singular."""
    model = measured(One(0.9), lambda u, x: u(x) - 0.4, None, ONES, fitted=2, weight=1.0)
    curve = jump.fit(model, torch.zeros(1).double(), 0.0, 0.25, Memory())
    assert float(curve.jump) == pytest.approx(0.5)
