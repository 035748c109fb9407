"""History and small system against a plain list of pairs, after any sequence of stores, resets and partial fills."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_anderson.history import PRODUCT_CHUNK, SHORT, History
from torch_anderson.least_squares import System

N = 5
CPU = torch.device("cpu")


@dataclass
class PairList:
    """What a history stands for: the last size + 1 pairs (w, u, lr), oldest first."""

    size: int
    pairs: list[tuple[np.ndarray, np.ndarray, float]] = field(default_factory=list)

    def store(self, w: np.ndarray, u: np.ndarray, lr: float) -> None:
        self.pairs = [*self.pairs, (w, u, lr)][-(self.size + 1) :]

    @property
    def rates(self) -> list[float]:
        return [lr for _, _, lr in self.pairs]

    @property
    def residuals(self) -> np.ndarray:
        """r / lr of every pair; 0 where lr is 0."""
        return np.array([(u - w) / lr if lr else 0 * w for w, u, lr in self.pairs]).reshape(-1, N)

    @property
    def map_diffs(self) -> np.ndarray:
        """Newest first."""
        return np.diff(np.array([u for _, u, _ in self.pairs]).reshape(-1, N), axis=0)[::-1]

    @property
    def residual_diffs(self) -> np.ndarray:
        """Newest first."""
        return np.diff(self.residuals, axis=0)[::-1]


class Recorder:
    """A history, its system and the plain list, driven together; pairs are random numbers."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64, n: int = N) -> None:
        self.history = History(size, n, device=CPU, dtype=dtype)
        self.system = System()
        self.plain = PairList(size)
        self.unread = 0
        self.generator = torch.Generator().manual_seed(0)

    def store(self, lr: float = 1.0) -> None:
        w, step = torch.randn(2, self.history.n, dtype=torch.float64, generator=self.generator).to(
            self.history.last_map.dtype
        )
        u = w + lr * step
        self.history.store(w, lambda a, b: u[a:b], lr)
        self.plain.store(w.double().numpy(), u.double().numpy(), lr)
        self.unread += 1

    def reset(self) -> None:
        self.history.reset()
        self.system = System()
        self.plain = PairList(self.history.size)
        self.unread = 0

    def read(self) -> None:
        """Take the products of rows stored since the last time into the system, as an acceleration does."""
        if len(self.plain.pairs) > 1:
            slots = self.history.newest_first
            products, residual_sq = self.history.products(slots[: self.unread])
            self.system.update(slots, products.tolist())
            self.unread = 0
            assert residual_sq.item() == pytest.approx(float(np.sum(self.plain.residuals[-1] ** 2)), rel=1e-12)

    def check(self) -> None:
        history, plain = self.history, self.plain
        slots = history.newest_first
        assert len(slots) == len(set(slots)) == max(len(plain.pairs) - 1, 0)
        assert history.learning_rates == plain.rates
        tolerance = {"rtol": 1e-12, "atol": 1e-12}
        np.testing.assert_allclose(history.map_diffs[slots], plain.map_diffs, **tolerance)
        np.testing.assert_allclose(history.residual_diffs[slots], plain.residual_diffs, **tolerance)
        empty = [slot for slot in range(history.size) if slot not in slots]
        assert not history.map_diffs[empty].any() and not history.residual_diffs[empty].any()
        if plain.pairs:
            np.testing.assert_allclose(history.last_map, plain.pairs[-1][1], **tolerance)
            np.testing.assert_allclose(history.last_residual, plain.residuals[-1], **tolerance)

    def check_system(self) -> None:
        R = self.plain.residual_diffs
        gram, rhs = self.system.gram, self.system.rhs
        tolerance = {"rtol": 1e-11, "atol": 1e-11}
        np.testing.assert_allclose(lower_triangle(gram), np.tril(R @ R.T), **tolerance)
        np.testing.assert_allclose(rhs, R @ self.plain.residuals[-1] if len(R) else [], **tolerance)


def lower_triangle(rows: list[list[float]]) -> np.ndarray:
    matrix = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        matrix[i, : len(row)] = row
    return np.tril(matrix)


stores = st.sampled_from([1.0, 1.0, 0.5, 0.1, 0.0])
operations = st.lists(st.one_of(stores, stores, stores, st.just("read"), st.just("reset")), max_size=40)


def drive(recorder: Recorder, steps: list) -> None:
    for step in steps:
        if step == "reset":
            recorder.reset()
        elif step == "read":
            recorder.read()
            recorder.check_system()
        else:
            recorder.store(step)
        recorder.check()


@settings(max_examples=200, derandomize=True, deadline=None)
@given(size=st.integers(1, 6), steps=operations)
def test_rows_products_and_order_are_those_of_a_list_of_pairs(size, steps):
    recorder = Recorder(size)
    drive(recorder, steps)
    recorder.read()
    recorder.check_system()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("between", range(1, 12))
def test_system_is_right_however_many_pairs_come_between_two_readings(size, between):
    recorder = Recorder(size)
    for _ in range(5):
        for _ in range(between):
            recorder.store()
        recorder.read()
        recorder.check_system()


def test_right_hand_side_does_not_drift_over_many_updates():
    recorder = Recorder(10)
    for _ in range(2000):
        recorder.store()
        recorder.read()
    recorder.check_system()


@pytest.mark.parametrize("n", [SHORT, SHORT + 1, PRODUCT_CHUNK, 6 * PRODUCT_CHUNK + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_long_vectors_are_exact(dtype, n):
    # Up to 6 chunks and a rest. Products are formed in float64 whatever the rows are kept in.
    history = History(3, n, device=CPU, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        w, r = torch.randn(2, n, dtype=dtype, generator=generator)
        u = w + r + 0.5
        history.store(w, lambda a, b, u=u: u[a:b])
    rows = torch.cat([history.residual_diffs, history.last_residual[None]]).double().numpy()
    for slots in (history.newest_first, history.newest_first[:1]):
        products, residual_sq = history.products(slots)
        expected = rows @ rows[slots].T
        np.testing.assert_allclose(products, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
        np.testing.assert_allclose(residual_sq, rows[-1] @ rows[-1], rtol=1e-12)


def test_differences_are_formed_before_the_products():
    # Residuals of length 1e6 that differ by 1: a Gram matrix of raw residuals, differenced, would be off by 1e-4.
    history = History(4, N, device=CPU, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    offset = 1e6 * torch.randn(N, dtype=torch.float64, generator=generator)
    residuals = [offset + torch.randn(N, dtype=torch.float64, generator=generator) for _ in range(5)]
    zero = torch.zeros(N, dtype=torch.float64)
    for r in residuals:
        history.store(zero, lambda a, b, r=r: r[a:b])
    R = torch.stack(residuals).diff(dim=0).flip(0)
    products, _ = history.products(history.newest_first)
    gram = products[history.newest_first]
    torch.testing.assert_close(gram, R @ R.T, rtol=1e-13, atol=1e-13)


def test_batched_histories_are_independent_histories():
    batch, size = 4, 3
    generator = torch.Generator().manual_seed(0)
    together = History(size, N, device=CPU, dtype=torch.float64, batch=(batch,))
    alone = [History(size, N, device=CPU, dtype=torch.float64) for _ in range(batch)]
    for _ in range(6):
        w, u = torch.randn(2, batch, N, dtype=torch.float64, generator=generator)
        together.store(w, lambda a, b, u=u: u[..., a:b])
        for i, history in enumerate(alone):
            history.store(w[i], lambda a, b, u=u[i]: u[a:b])
        assert_same(together.map_diffs, [history.map_diffs for history in alone])
        assert_same(together.residual_diffs, [history.residual_diffs for history in alone])
        products, residual_sq = zip(*(history.products(range(size)) for history in alone), strict=True)
        assert_same(together.products(range(size))[0], products)
        assert_same(together.products(range(size))[1], residual_sq)


def assert_same(together: Tensor, alone: Sequence[Tensor]) -> None:
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-13, atol=1e-13)
