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
from torch.optim import ASGD, LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer, Rprop

NOT_PROPORTIONAL_TO_LR = (ASGD, LBFGS, Adafactor, Rprop)
COUPLED_DECAY = (SGD, Adam)
"""Bases of the tests that add weight_decay w to the gradient."""


class Average(Protocol):
    """The moving average: any object with these three attributes."""

    window: int
    tolerance: float


class Pair(NamedTuple):
    """One stored pair; `rn` is the residual per unit of learning rate, `rates` are those of the groups at its end."""

    w: Tensor
    rn: Tensor
    rate: float
    rates: tuple[float, ...]


class PendingResidual(NamedTuple):
    """A jump whose test is the next residual, and what to return to if it fails."""

    jump: Tensor
    u: Tensor
    norm: Tensor
    base_state: dict


class PendingGradient(NamedTuple):
    """A jump whose test is the next gradient: the weights w of the gradient g before it, and where to return to.

    `plain` is where the weights would be without the jump: u, or the mean of a window that ends with u; `jump` is where
    they are with it. `length` is that of the jump and the path through all stored points.
    """

    w: Tensor
    g: Tensor
    u: Tensor
    jump: Tensor
    plain: Tensor
    length: Tensor


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
        safeguard: str | None = "gradient",
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
        self.pending: PendingResidual | PendingGradient | None = None
        self.rest, self.wait = 0, 0

    def step(self, closure: Callable | None = None, loss_fn: Callable | None = None):
        """One base step, then whatever is due after it; or a jump that is taken back instead of it."""
        if self._by_gradient() and isinstance(self.base, LBFGS):
            return self.base.step(closure)  # its pairs would be wrong after a jump
        w, rate, measured = self._read(), self._rate(), self._measured(self.k + 1)
        if self._by_gradient():
            loss = closure() if closure else None
            gradient = self._gradient(w)
            waits = isinstance(self.pending, PendingGradient) and gradient is not None and self._moves()
            if waits and not self._passes(self.pending, w, gradient):
                return loss
            self.base.step()
        else:
            loss, gradient = self.base.step(closure), None
        u = self._read()
        if not self._counts(measured, w, u):
            return loss
        self.k += 1
        if isinstance(self.pending, PendingResidual) and not self._settle(self.pending, w, u, rate):
            return loss
        jump = None
        if self._stores(self.k):
            self._store(Pair(w, (u - w) / self._scale(rate), rate, self._group_rates()))
            jump = self._accelerate(loss_fn, gradient) if not self.wait else None
        self.wait = max(self.wait - 1, 0)
        if isinstance(self.pending, PendingResidual):
            return loss
        if jump is not None:
            self._write(jump)
        if self.average:
            self._average(self.average, jump, u, r=u - w)
        return loss

    def overwritten(self) -> None:
        """Other code has written to the weights: averages would undo a part of that."""
        self.window = []

    def cancel(self) -> None:
        """Let a pending jump stay, undecided, and drop the averages; the stored pairs stay."""
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
        if not self._moves():
            return False
        if measured:
            return not torch.equal(u, w)
        return any(p.grad is not None for group in self.base.param_groups for p in group["params"])

    def _moves(self) -> bool:
        """Whether any learning rate is above 0."""
        return any(group["lr"] for group in self.base.param_groups)

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

    def _accelerate(self, loss_fn: Callable | None, gradient: Tensor | None) -> Tensor | None:
        """The jump from the newest pair, if one is due and passes its tests now."""
        if self.k % self.period or len(self.pairs) < 2:
            return None
        w, r, W, R = self._columns()
        g = self._coefficients(r, R)
        gain = ((r - R @ g).norm() / r.norm()).item()
        candidate = self._mix(w, r, W, R, g)
        if gradient is not None and (length := (candidate - w).norm()) > 2 * self._path():
            candidate = w + (2 * self._path() / length) * (candidate - w)
        cause = self._reason_to_skip(gain, loss_fn) or self._judge(candidate, w, loss_fn, gradient)
        self.last = {"coefficients": g, "gain": gain, "cause": cause}
        if cause != "pending":
            return candidate if cause == "accepted" else None
        if gradient is None:
            self._suspend(candidate)
            return None
        u = self._read()
        self.pending = PendingGradient(w, gradient, u, candidate, u, (candidate - w).norm() + self._path())
        return candidate

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

    def _judge(self, candidate: Tensor, w: Tensor, loss_fn: Callable | None, gradient: Tensor | None) -> str:
        if not candidate.isfinite().all():
            return "nonfinite"
        if (candidate - w).norm() > (1 + 1e-12) * self.max_jump * self._path():  # which may be its shortened length
            return "too_long"
        if gradient is not None and gradient @ (candidate - w) >= 0:
            return "no_descent"
        if self.safeguard in ("gradient", "residual"):
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

    def _by_gradient(self) -> bool:
        """Whether the next gradient decides on jumps."""
        return self.safeguard == "gradient"

    def _gradient(self, w: Tensor) -> Tensor | None:
        """The gradient of what the base descends, where w decays as a part of it."""
        if all(p.grad is None for p in self._parameters()):
            return None
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters()]
        decays = [group.get("weight_decay", 0.0) for group in self._groups() for _ in group["params"]]
        coupled = isinstance(self.base, COUPLED_DECAY) and not isinstance(self.base, AdamW)
        decayed = zip(parts, self._split(w), decays, strict=True)
        return torch.cat([(g + decay * x if coupled else g).flatten() for g, x, decay in decayed])

    def _passes(self, pending: PendingGradient, now: Tensor, gradient: Tensor) -> bool:
        """Accept the pending jump if the slope has become flat enough; else go back, and let some steps pass.

        By the slopes at both ends, the loss has to fall at least by half of what the plain step promised.
        Also true where other weights were loaded, which stay.
        """
        assert self.last  # the acceleration that made the jump
        way = now - pending.w
        if way.norm() > 2 * pending.length:
            self.reset()
            return True
        self.pending = None
        slope, descent, plain_descent = gradient @ way, -pending.g @ way, -pending.g @ (pending.u - pending.w)
        steeper = gradient.norm() > 4 * pending.g.norm()
        if slope <= 0.3 * descent and (descent - slope) / 2 >= plain_descent / 2 and not steeper:
            self.last["cause"] = "accepted"
            self.rest //= 4
            return True
        self.last["cause"] = "gradient"
        self.wait = self.rest = min(max(2 * self.rest, 4), 128)
        if self._return(pending.plain, pending.jump, now):
            self.window[-1:] = [pending.u] if self.window else []
            return False
        return True

    def _return(self, plain: Tensor, candidate: Tensor, now: Tensor) -> bool:
        """Take a jump out of the weights, but not what was written across it.

        If that is longer than the jump, other weights were loaded: all stays, and nothing is known there.
        """
        jump, written = candidate - plain, now - candidate
        parts = zip(map(torch.flatten, self._split(jump)), map(torch.flatten, self._split(written)), strict=True)
        across = torch.cat([e - (e @ j / (j @ j) if j.any() else 0.0) * j for j, e in parts])
        if written.norm() > 1.5 * jump.norm():
            self.last["cause"] = "outside_write"
            self.window = []
            self._restart()
            return False
        self._write(plain + across)
        return True

    def _suspend(self, jump: Tensor) -> None:
        # The keys are the parameters themselves and must stay them; only the values are copied.
        base_state = {p: copy.deepcopy(self.base.state[p]) for p in self._parameters() if p in self.base.state}
        self.pending = PendingResidual(jump, self._read(), self.pairs[-1].rn.norm(), base_state)
        self._write(jump)

    def _settle(self, pending: PendingResidual, w: Tensor, u: Tensor, rate: float) -> bool:
        """Accept the pending jump if the residual fell; else go back to where it was made."""
        self.pending = None
        assert self.last  # the acceleration that made the jump
        if ((u - w) / self._scale(rate)).norm() < pending.norm:
            self.last["cause"] = "accepted"
            self._restart_window(w)
            return True
        self.last["cause"] = "residual"
        if not self._return(pending.u, pending.jump, w):
            return False
        self._push(self._read())
        for p in self._parameters():
            self.base.state.pop(p, None)
        self.base.state.update(pending.base_state)
        return False

    # Averaging

    def _average(self, average: Average, jump: Tensor | None, u: Tensor, r: Tensor) -> None:
        if jump is None:
            self._push(u)
        else:
            self._restart_window(jump)
        if len(self.window) == average.window and self._noisy(average, r):
            self._write(torch.stack(self.window).mean(0))
            if isinstance(self.pending, PendingGradient):
                without = torch.stack([*self.window[:-1], self.pending.u]).mean(0)
                self.pending = self.pending._replace(plain=without, jump=self._read())

    def _restart_window(self, jump: Tensor) -> None:
        # A mean across a jump would undo most of it; at period 1 every point is a jump and all are kept.
        if self.period > 1:
            self.window = []
        self._push(jump)

    def _push(self, point: Tensor) -> None:
        self.window = [*self.window, point][-self.average.window :] if self.average else []

    def _noisy(self, average: Average, r: Tensor) -> bool:
        points = torch.stack(self.window)
        return bool(points.var(0, correction=0).sqrt().max() > average.tolerance * r.abs().max())

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
        for p, part in zip(self._parameters(), self._split(point), strict=True):
            p.copy_(part)

    def _split(self, point: Tensor) -> list[Tensor]:
        """A flat point in the parameters' shapes."""
        parameters = self._parameters()
        parts = point.split([p.numel() for p in parameters])
        return [part.view_as(p) for p, part in zip(parameters, parts, strict=True)]


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
