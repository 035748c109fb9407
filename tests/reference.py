"""The textbook twin of `torch_anderson.Anderson`: the algorithm with nothing in its way.

It shares no code with the library. The history is a plain list of pairs; the differences are formed anew at every
acceleration and solved by SVD; speed and memory are no concern. Tests run both side by side in float64.

    w       flat parameters before the base step of a pair
    u       w + r: parameters after it
    r       the residual u - w
    rate    what r is proportional to: the largest learning rate of the groups
    g       the coefficients, argmin |r - R g|; oldest column first
"""

import copy
import itertools
from collections.abc import Callable
from math import inf, isclose
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import ASGD, LBFGS, Adafactor, Optimizer, Rprop

NOT_PROPORTIONAL_TO_LR = (ASGD, LBFGS, Adafactor, Rprop)


class Average(Protocol):
    """The moving average: any object with these three attributes."""

    window: int
    tolerance: float
    criterion: str


class Pair(NamedTuple):
    """One stored pair; `rn` is the residual per unit of learning rate, `rates` are those of the groups at its end."""

    w: Tensor
    rn: Tensor
    rate: float
    rates: tuple[float, ...]


class Pending(NamedTuple):
    """A jump whose test is the next residual, and what to return to if it fails."""

    jump: Tensor
    u: Tensor
    norm: Tensor
    base_state: dict


class TextbookAnderson:
    """Anderson acceleration of `base`, with the options of `torch_anderson.Anderson(residual="step")`.

    `mixing` exists here only: "paper" is the library's, "b" and "anderson" are two other readings of beta. `last`
    describes the last acceleration: its coefficients, its gain |r - R g| / |r|, and as its cause "accepted", "pending"
    or the test that it failed. `restarts` counts how often the pairs were dropped.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        history_size: int = 10,
        period: int = 1,
        store_period: int = 1,
        relaxation: float = 1.0,
        mixing: str = "paper",
        warmup: int = 0,
        average: Average | None = None,
        regularization: float = 0.0,
        max_jump: float = inf,
        safeguard: str | None = "residual",
        max_gain: float = 0.98,
    ) -> None:
        self.base = base
        self.history_size, self.period, self.store_period = history_size, period, store_period
        self.relaxation, self.mixing, self.warmup = relaxation, mixing, warmup
        self.average, self.regularization = average, regularization
        self.max_jump, self.safeguard, self.max_gain = max_jump, safeguard, max_gain
        self.k = 0
        self.restarts = 0
        self.pairs: list[Pair] = []
        self.window: list[Tensor] = []
        self.last: dict | None = None
        self.pending: Pending | None = None

    def step(self, closure: Callable | None = None, loss_fn: Callable | None = None):
        """One base step, then whatever is due after it."""
        w, rate, measured = self._read(), self._rate(), self._measured(self.k + 1)
        loss = self.base.step(closure)
        u = self._read()
        if not self._counts(measured, w, u):
            return loss
        self.k += 1
        if self.pending and not self._settle(self.pending, u - w, rate):
            return loss
        jump = None
        if self._stores(self.k):
            self._store(Pair(w, (u - w) / self._scale(rate), rate, self._group_rates()))
            jump = self._accelerate(loss_fn)
        if self.pending:
            return loss
        if jump is not None:
            self._write(jump)
        if self.average:
            self._average(self.average, jump, u, r=u - w)
        return loss

    def cancel(self) -> None:
        """Drop what does not survive weights that were written from elsewhere; the stored pairs stay."""
        if self.pending and self.last:
            self.last["cause"] = "outside_write"
        self.pending, self.window = None, []

    def reset(self) -> None:
        """Forget all that was measured; the weights stay."""
        self.cancel()
        self._restart()

    # Counting

    def _measured(self, k: int) -> bool:
        """Whether step k has to know the weights before it; what it leaves unmeasured costs nothing."""
        return self.average is not None or self.pending is not None or self._stores(k)

    def _counts(self, measured: bool, w: Tensor, u: Tensor) -> bool:
        """Whether the base did something; a step that is not measured did if there was a gradient."""
        if not any(group["lr"] for group in self.base.param_groups):
            return False
        if measured:
            return not torch.equal(u, w)
        return any(p.grad is not None for group in self.base.param_groups for p in group["params"])

    # Pairs

    def _stores(self, k: int) -> bool:
        """Whether the pair of step k is stored."""
        return k > self.warmup and (k % self.store_period == 0 or k % self.period == 0)

    def _proportional(self) -> bool:
        return not isinstance(self.base, NOT_PROPORTIONAL_TO_LR)

    def _scale(self, rate: float) -> float:
        return rate if self._proportional() else 1.0

    def _store(self, pair: Pair) -> None:
        if self.pairs and not self._comparable(self.pairs[-1].rates, pair.rates):
            self._restart()
        self.pairs = [*self.pairs, pair][-(self.history_size + 1) :]

    def _comparable(self, before: tuple[float, ...], now: tuple[float, ...]) -> bool:
        """Whether residuals at these rates of the groups follow from each other by one common factor.

        Schedules round what they multiply, hence "close". If the base's steps are not proportional to the learning
        rate, there is no factor but 1.
        """
        if not self._proportional():
            return before == now
        pairs = zip(before, now, strict=True)
        return all(isclose(a * max(now), b * max(before), rel_tol=1e-9) for a, b in pairs)

    def _restart(self) -> None:
        self.pairs = []
        self.restarts += 1

    # Extrapolation

    def _accelerate(self, loss_fn: Callable | None) -> Tensor | None:
        """The jump from the newest pair, if one is due and passes its tests now."""
        if self.k % self.period or len(self.pairs) < 2:
            return None
        w, r, W, R = self._columns()
        g = self._coefficients(r, R)
        gain = ((r - R @ g).norm() / r.norm()).item()
        candidate = self._mix(w, r, W, R, g)
        cause = self._reason_to_skip(gain, loss_fn) or self._judge(candidate, w, loss_fn)
        self.last = {"coefficients": g, "gain": gain, "cause": cause}
        if cause == "pending":
            self._suspend(candidate)
        return candidate if cause == "accepted" else None

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The present pair, and the differences of all pairs re-read at the present learning rate."""
        scale = self._scale(self.pairs[-1].rate)
        ws = torch.stack([pair.w for pair in self.pairs], dim=1)
        rs = torch.stack([scale * pair.rn for pair in self.pairs], dim=1)
        return ws[:, -1], rs[:, -1], ws.diff(), rs.diff()

    def _coefficients(self, r: Tensor, R: Tensor) -> Tensor:
        """argmin |r - R g|^2 + regularization |D g|^2, D the norms of the columns; 0 for a zero column."""
        if not (r.isfinite().all() and R.isfinite().all()):
            return r.new_full((R.shape[1],), torch.nan)
        norms = R.norm(dim=0)
        norms = torch.where(norms == 0, 1.0, norms)
        damping = self.regularization**0.5 * torch.eye(len(norms), dtype=r.dtype)
        matrix = torch.cat([R / norms, damping])
        target = torch.cat([r, r.new_zeros(len(norms))])
        # gelsd: the solution of least norm, so that columns that say nothing get nothing.
        return torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0] / norms

    def _mix(self, w: Tensor, r: Tensor, W: Tensor, R: Tensor, g: Tensor) -> Tensor:
        beta = self.relaxation
        match self.mixing:
            case "paper":
                return w + beta * (r - (W + R) @ g)
            case "b":
                return w + r - beta * (W + R) @ g
            case "anderson":
                return w - W @ g + beta * (r - R @ g)
        raise ValueError(self.mixing)

    # Safeguards

    def _reason_to_skip(self, gain: float, loss_fn: Callable | None) -> str:
        if self.safeguard == "loss" and loss_fn is None:
            return "no_loss"
        return "no_gain" if gain > self.max_gain else ""

    def _judge(self, candidate: Tensor, w: Tensor, loss_fn: Callable | None) -> str:
        if not candidate.isfinite().all():
            return "nonfinite"
        if (candidate - w).norm() > self.max_jump * self._path():
            return "too_long"
        if self.safeguard == "residual":
            return "pending"
        return self._judge_by_loss(candidate, loss_fn) if loss_fn and self.safeguard == "loss" else "accepted"

    def _path(self) -> Tensor:
        """Length of the path through the points u = w + r, as they were measured."""
        points = torch.stack([pair.w + self._scale(pair.rate) * pair.rn for pair in self.pairs], dim=1)
        return points.diff().norm(dim=0).sum()

    @torch.no_grad()
    def _judge_by_loss(self, candidate: Tensor, loss_fn: Callable) -> str:
        plain = self._read()
        plain_loss = float(loss_fn())
        self._write(candidate)
        candidate_loss = float(loss_fn())
        self._write(plain)
        return "accepted" if candidate_loss < plain_loss else "loss"

    def _suspend(self, jump: Tensor) -> None:
        # The keys are the parameters themselves and must stay them; only the values are copied.
        base_state = {p: copy.deepcopy(self.base.state[p]) for p in self._parameters() if p in self.base.state}
        self.pending = Pending(jump, self._read(), self.pairs[-1].rn.norm(), base_state)
        self._write(jump)

    def _settle(self, pending: Pending, r: Tensor, rate: float) -> bool:
        """Accept the pending jump if the residual fell; else go back to where it was made."""
        self.pending = None
        assert self.last  # the acceleration that made the jump
        if (r / self._scale(rate)).norm() < pending.norm:
            self.last["cause"] = "accepted"
            self._restart_window(pending.jump)
            return True
        self.last["cause"] = "residual"
        self._write(pending.u)
        for p in self._parameters():
            self.base.state.pop(p, None)
        self.base.state.update(pending.base_state)
        self._push(pending.u)
        return False

    # Averaging

    def _average(self, average: Average, jump: Tensor | None, u: Tensor, r: Tensor) -> None:
        if jump is None:
            self._push(u)
        else:
            self._restart_window(jump)
        if len(self.window) == average.window and self._noisy(average, r):
            self._write(torch.stack(self.window).mean(0))

    def _restart_window(self, jump: Tensor) -> None:
        # A mean across a jump would undo most of it; at period 1 every point is a jump and all are kept.
        if self.period > 1:
            self.window = []
        self._push(jump)

    def _push(self, point: Tensor) -> None:
        self.window = [*self.window, point][-self.average.window :] if self.average else []

    def _noisy(self, average: Average, r: Tensor) -> bool:
        points = torch.stack(self.window)
        variance = detrended_variance(points) if average.criterion == "detrended" else points.var(0, correction=0)
        return bool(variance.sqrt().max() > average.tolerance * r.abs().max())

    # Parameters

    def _groups(self) -> list[dict]:
        """Those that take part."""
        return [group for group in self.base.param_groups if group.get("anderson", True)]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._groups() for p in group["params"]]

    def _group_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self._groups())

    def _rate(self) -> float:
        return max(self._group_rates())

    def _read(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self._parameters()])

    @torch.no_grad()
    def _write(self, point: Tensor) -> None:
        parameters = self._parameters()
        for p, part in zip(parameters, point.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


def detrended_variance(points: Tensor) -> Tensor:
    """Each column's residual sum of squares about its straight-line fit, over t - 2 degrees of freedom."""
    time = torch.arange(len(points), dtype=points.dtype)
    line = torch.stack([torch.ones_like(time), time], dim=1)
    misfit = points - line @ torch.linalg.lstsq(line, points).solution
    return misfit.square().sum(0) / (len(points) - 2)


def lbfgs_direction(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """-H g by the two loops of limited-memory BFGS (Nocedal and Wright, Algorithm 7.4), for pairs (point, gradient)."""
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(pairs)]
    q = pairs[-1][1].clone()
    alphas = []
    for s, y in reversed(steps):
        alphas.append(s @ q / (y @ s))
        q -= alphas[-1] * y
    s, y = steps[-1]
    q *= s @ y / (y @ y)
    for (s, y), alpha in zip(steps, reversed(alphas), strict=True):
        q += (alpha - y @ q / (y @ s)) * s
    return -q
