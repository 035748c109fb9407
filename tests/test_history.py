"""Pairs and their Gram matrix against a plain list of pairs, after any sequence of stores, resets and partial fills."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_anderson import Storage
from torch_anderson._anderson.pairs import CHUNK, FLOAT64_NUMBERS, LAUNCHES, PIECE, Pairs
from torch_anderson._anderson.step import Problem
from torch_anderson._tensors.blocks import Space

N = 5


def space_of(n: int, dtype: torch.dtype = torch.float64) -> Space:
    return Space([{"params": [torch.zeros(n, dtype=dtype, requires_grad=True)]}], None)


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
    def point_diffs(self) -> np.ndarray:
        """Previous minus present, newest first."""
        return -np.diff(np.array([u for _, u, _ in self.pairs]).reshape(-1, N), axis=0)[::-1]

    @property
    def residual_diffs(self) -> np.ndarray:
        """Previous minus present, newest first."""
        return -np.diff(self.residuals, axis=0)[::-1]


class Recorder:
    """Pairs and the plain list, driven together; the numbers are random."""

    def __init__(self, size: int, storage: Storage | None = None) -> None:
        self.space = space_of(N)
        self.pairs = Pairs(self.space, size, storage or Storage())
        self.plain = PairList(size)
        self.generator = torch.Generator().manual_seed(0)

    def store(self, lr: float = 1.0) -> None:
        w, step = torch.randn(2, N, dtype=torch.float64, generator=self.generator)
        u = w + lr * step
        self.plain.store(w.numpy().copy(), u.numpy().copy(), lr)
        free = self.pairs.store([u], [u - w], lr)
        assert free[0] is not self.pairs.last_point[0]

    def reset(self) -> None:
        self.pairs.clear()
        self.plain = PairList(self.pairs.size)

    def check(self) -> None:
        pairs, plain = self.pairs, self.plain
        [rows] = pairs.rows
        slots = pairs.newest_first
        assert pairs.rates == plain.rates
        assert len(slots) == len(set(slots)) == max(len(plain.pairs) - 1, 0)
        tolerance = {"rtol": 1e-12, "atol": 1e-12}
        np.testing.assert_allclose(rows.point_diffs[slots], plain.point_diffs, **tolerance)
        np.testing.assert_allclose(rows.residual_diffs[slots], plain.residual_diffs, **tolerance)
        empty = [slot for slot in range(pairs.size) if slot not in slots]
        assert not rows.point_diffs[empty].any() and not rows.residual_diffs[empty].any()
        if plain.pairs:
            np.testing.assert_allclose(pairs.last_point[0], plain.pairs[-1][1], **tolerance)
            np.testing.assert_allclose(rows.last_residual, plain.residuals[-1], **tolerance)

    def check_gram(self) -> None:
        """Take in what was stored since the last time, as an acceleration does, and compare all products."""
        if len(self.plain.pairs) < 2:
            return
        self.pairs.update()
        problem = Problem.posed(self.pairs, 0.0)
        R, r, U = self.plain.residual_diffs, self.plain.residuals[-1], self.plain.point_diffs
        tolerance = {"rtol": 1e-11, "atol": 1e-11}
        np.testing.assert_allclose(lower_triangle(problem.gram), np.tril(R @ R.T), **tolerance)
        size, slots = self.pairs.size, self.pairs.newest_first
        rows = [*slots, size, *(size + 1 + slot for slot in slots)]
        Z = np.vstack([R, r[None], U])
        np.testing.assert_allclose(np.array(self.pairs.matrix)[np.ix_(rows, rows)], Z @ Z.T, **tolerance)
        assert problem.path == pytest.approx(np.linalg.norm(U, axis=1).sum(), rel=1e-12)
        assert problem.residual_norm == pytest.approx(self.plain.rates[-1] * np.linalg.norm(r), rel=1e-12)


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
            recorder.check_gram()
        else:
            recorder.store(step)
        recorder.check()


@settings(max_examples=200, derandomize=True, deadline=None)
@given(size=st.integers(1, 6), steps=operations)
def test_rows_products_and_order_are_those_of_a_list_of_pairs(size, steps):
    recorder = Recorder(size)
    drive(recorder, steps)
    recorder.check_gram()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("between", range(1, 12))
def test_gram_matrix_is_right_however_many_pairs_come_between_two_readings(size, between):
    recorder = Recorder(size)
    for _ in range(5):
        for _ in range(between):
            recorder.store()
        recorder.check_gram()


@pytest.mark.parametrize(
    "n", [FLOAT64_NUMBERS, FLOAT64_NUMBERS + 1, CHUNK, CHUNK + 17, 5 * CHUNK + 3, LAUNCHES * CHUNK + 5]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precise", [True, False])
def test_products_of_long_vectors_are_precise_or_good_to_single_precision(precise, dtype, n):
    space = space_of(n, dtype)
    pairs = Pairs(space, 3, Storage())
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        w, r = torch.randn(2, n, dtype=dtype, generator=generator)
        pairs.store([w + 0.5], [r + 0.5])
    [rows] = pairs.rows
    Z = torch.cat([rows.residual_diffs, rows.last_residual[None], rows.point_diffs]).double().numpy()
    expected = Z @ Z.T
    tolerance = 1e-12 if precise or pairs.float64 else 1e-6
    pairs.precise = precise
    for fresh in (3, 1):
        pairs.fresh = fresh
        pairs.update()
        np.testing.assert_allclose(pairs.matrix, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_differences_are_formed_before_the_products():
    # Residuals of length 1e6 that differ by 1: a Gram matrix of raw residuals, differenced, would be off by 1e-4.
    space = space_of(N)
    pairs = Pairs(space, 4, Storage())
    generator = torch.Generator().manual_seed(0)
    offset = 1e6 * torch.randn(N, dtype=torch.float64, generator=generator)
    residuals = [offset + torch.randn(N, dtype=torch.float64, generator=generator) for _ in range(5)]
    for r in residuals:
        pairs.store([r.clone()], [r])
    R = torch.stack(residuals).diff(dim=0).flip(0)
    pairs.update()
    problem = Problem.posed(pairs, 0.0)
    np.testing.assert_allclose(lower_triangle(problem.gram), np.tril(R @ R.T), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("storage", [Storage(), Storage(device="cpu"), Storage(dtype=torch.bfloat16)], ids=str)
def test_candidate_is_the_last_point_plus_the_weighted_rows(storage):
    recorder = Recorder(3, storage)
    for _ in range(5):
        recorder.store()
    [rows] = recorder.pairs.rows
    Z = torch.cat([rows.residual_diffs.double(), rows.last_residual[None], rows.point_diffs.double()])
    for weights in ([0.0] * 4 + [1.0, -2.0, 0.5], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]):
        target = torch.full((N,), torch.nan, dtype=torch.float64)
        recorder.pairs.combine(weights, [target])
        expected = recorder.pairs.last_point[0] + Z.T @ torch.tensor(weights, dtype=torch.float64)
        torch.testing.assert_close(target, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [N, FLOAT64_NUMBERS + 1, 2 * PIECE, 5 * PIECE + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("residuals", [False, True])
def test_rounding_of_a_candidate_is_that_of_the_jump_and_once_that_of_the_point(residuals, dtype, n):
    pairs = Pairs(space_of(n, dtype), 3, Storage())
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        pairs.store(
            [torch.randn(n, dtype=dtype, generator=generator) + 1e4], [torch.randn(n, dtype=dtype, generator=generator)]
        )
    [rows] = pairs.rows
    weights = torch.randn(7, dtype=torch.float64, generator=generator).to(dtype)
    weights[:4] *= residuals
    target = torch.full((n,), torch.nan, dtype=dtype)
    pairs.combine(weights.tolist(), [target])
    Z = torch.cat([rows.residual_diffs, rows.last_residual[None], rows.point_diffs])
    Z, w, last, found = (x.numpy().astype(np.longdouble) for x in (Z, weights, pairs.last_point[0], target))
    # Half an eps for each of 8 terms of the jump, and once for the point.
    bound = torch.finfo(dtype).eps * (abs(last) / 2 + 4 * abs(Z).T @ abs(w))
    assert (abs(found - (last + Z.T @ w)) <= bound).all()


@pytest.mark.parametrize(
    ("n", "storage", "rounded"), [(N, None, False), (N, torch.bfloat16, True), (2 * FLOAT64_NUMBERS, None, True)]
)
def test_rows_are_rounded_unless_they_are_kept_in_double_precision(n, storage, rounded):
    pairs = Pairs(space_of(n, torch.float32), 3, Storage(dtype=storage))
    assert pairs.rounded == rounded
    kept = pairs.rows[0].point_diffs.dtype
    assert (kept != torch.float64) == rounded
