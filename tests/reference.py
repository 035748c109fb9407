"""The textbook twin of `torch_anderson.Anderson`: the algorithm with nothing in its way.

It shares no code with the library. History is a plain list of pairs, the differences are formed anew at every
acceleration and solved by SVD; speed and memory are no concern. Tests run both side by side in float64.

    w       flat parameters before a base step, or before the first step of a cycle (the anchor)
    u       w + r: where the base step went, or the mean of the last iterates of the cycle
    r       the residual u - w
    scale   what r is proportional to: the learning rate of each entry, summed over a cycle
    g       the coefficients, argmin |r - R g|; oldest column first
"""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import ASGD, LBFGS, Adafactor, Optimizer, Rprop

NOT_PROPORTIONAL_TO_LR = (ASGD, LBFGS, Adafactor, Rprop)
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


class Pair(NamedTuple):
    """One stored pair; `rn` is the residual per unit of learning rate, `lr` has one value per entry."""

    w: Tensor
    rn: Tensor
    lr: Tensor


class Pending(NamedTuple):
    """A jump whose test is the next residual, and what to return to if it fails."""

    jump: Tensor
    u: Tensor
    norm: Tensor
    base_state: dict


class TextbookAnderson:
    """Anderson acceleration of `base`, with the options of `torch_anderson.Anderson`.

    `mixing="b"` (a third reading of beta) exists here only. `last` tells of the last acceleration: its
    coefficients, its gain |r - R g| / |r|, and as its cause "accepted", "pending" or the test that it failed.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        history_size: int = 10,
        period: int = 10,
        store_period: int = 1,
        relaxation: float = 1.0,
        mixing: str = "paper",
        warmup: int = 0,
        residual: str = "step",
        average_window: int = 0,
        average_tolerance: float = 0.1,
        average_criterion: str = "paper",
        regularization: float | str = 0.0,
        max_jump: float = 2.0,
        safeguard: str | None = "descent",
        on_accept: str = "keep",
        max_gain: float = 0.98,
        trusted_gain: float = 0.9,
        smooth: float = 0.9,
        noise_regularization: float = 0.1,
    ) -> None:
        self.base = base
        self.history_size, self.period, self.store_period = history_size, period, store_period
        self.relaxation, self.mixing, self.warmup = relaxation, mixing, warmup
        self.cycle = residual == "cycle"
        self.average_window, self.average_tolerance = average_window, average_tolerance
        self.average_criterion, self.regularization = average_criterion, regularization
        self.max_jump, self.safeguard, self.max_gain = max_jump, safeguard, max_gain
        self.trusted_gain, self.smooth = trusted_gain, smooth
        self.noise_regularization = noise_regularization
        self.on_accept = on_accept
        self.k = 0
        self.pairs_since_jump = 0
        self.pairs: list[Pair] = []
        self.window: list[Tensor] = []
        self.last: dict | None = None
        self.pending: Pending | None = None
        self.cycle_steps: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def step(self, closure: Callable | None = None, loss_fn: Callable | None = None):
        """One base step, then whatever is due after it."""
        w, lr, measured = self._read(), self._learning_rates(), self._measured(self.k + 1)
        loss = self.base.step(closure)
        u = self._read()
        if not self._counts(measured, w, u):
            return loss
        self.k += 1
        if self.pending and not self._settle(self.pending, u - w, lr):
            return loss
        pair = self._cycle_pair(w, u, lr) if self.cycle else self._step_pair(w, u, lr)
        jump = None
        if pair:
            self._store(pair)
            jump = self._accelerate(loss_fn)
        if self.pending:
            return loss
        if jump is not None:
            self._accept(jump)
        if not self.cycle:
            self._average(jump, u, r=u - w)
        return loss

    # Counting

    def _measured(self, k: int) -> bool:
        """Whether step k has to know the weights before it; what it leaves unmeasured costs nothing."""
        if self.cycle:
            return self._begins_cycle(k)
        return self.average_window > 0 or self.pending is not None or self._stores(k)

    def _counts(self, measured: bool, w: Tensor, u: Tensor) -> bool:
        """Whether the base did something; a step that is not measured did if there was a gradient."""
        if not any(group["lr"] for group in self.base.param_groups):
            return False
        if measured:
            return not torch.equal(u, w)
        return any(p.grad is not None for group in self.base.param_groups for p in group["params"])

    # Pairs

    def _stores(self, k: int) -> bool:
        return k > self.warmup and (k % self.store_period == 0 or k % self.period == 0)

    def _begins_cycle(self, k: int) -> bool:
        return k > self.warmup and (k - 1) % self.period == 0

    def _step_pair(self, w: Tensor, u: Tensor, lr: Tensor) -> Pair | None:
        return self._pair(w, u, lr) if self._stores(self.k) else None

    def _cycle_pair(self, w: Tensor, u: Tensor, lr: Tensor) -> Pair | None:
        """The pair (anchor, end - anchor) at the end of a cycle that was seen from its start."""
        if self._begins_cycle(self.k):
            self.cycle_steps = []
        if self.cycle_steps is None:
            return None
        self.cycle_steps.append((w, u, lr))
        if self.k % self.period:
            return None
        befores, afters, lrs = zip(*self.cycle_steps, strict=True)
        end = torch.stack(afters[-max(1, self.average_window) :]).mean(0)
        return self._pair(befores[0], end, torch.stack(lrs).sum(0) if self._proportional() else lr)

    def _pair(self, w: Tensor, u: Tensor, lr: Tensor) -> Pair:
        return Pair(w, self._per_scale(u - w, lr), lr)

    def _proportional(self) -> bool:
        return not isinstance(self.base, NOT_PROPORTIONAL_TO_LR)

    def _scale(self, lr: Tensor) -> Tensor:
        return lr if self._proportional() else torch.ones_like(lr)

    def _per_scale(self, r: Tensor, lr: Tensor) -> Tensor:
        scale = self._scale(lr)
        return torch.where(scale == 0, 0.0, r / scale)

    def _store(self, pair: Pair) -> None:
        # Residuals that are not proportional to the learning rate cannot be re-read at another one.
        if self.pairs and not self._proportional() and not torch.equal(self.pairs[-1].lr, pair.lr):
            self.pairs, self.pairs_since_jump = [], 0
        self.pairs = [*self.pairs, pair][-(self.history_size + 1) :]
        self.pairs_since_jump += 1

    # Extrapolation

    def _accelerate(self, loss_fn: Callable | None) -> Tensor | None:
        """The jump from the newest pair, if one is due and passes its tests now."""
        if self.k % self.period or len(self.pairs) < 2:
            return None
        w, r, W, R = self._columns()
        g = self._coefficients(r, R)
        gain = ((r - R @ g).norm() / r.norm()).item()
        candidate = self._mix(w, r, W, R, g)
        cause = self._reason_to_skip(r, R, gain, loss_fn) or self._judge(candidate, w, r, W, loss_fn)
        self.last = {"coefficients": g, "gain": gain, "cause": cause}
        if cause == "pending":
            self._suspend(candidate)
        return candidate if cause == "accepted" else None

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The present pair, and the differences of all pairs re-read at the present learning rate."""
        scale = self._scale(self.pairs[-1].lr)
        ws = torch.stack([pair.w for pair in self.pairs], dim=1)
        rs = torch.stack([scale * pair.rn for pair in self.pairs], dim=1)
        return ws[:, -1], rs[:, -1], ws.diff(), rs.diff()

    def _coefficients(self, r: Tensor, R: Tensor) -> Tensor:
        """argmin |r - R g|^2 + regularization |D g|^2, D the norms of the columns; 0 for a zero column."""
        if not (r.isfinite().all() and R.isfinite().all()):
            return r.new_full((R.shape[1],), torch.nan)
        norms = R.norm(dim=0)
        norms = torch.where(norms == 0, 1.0, norms)
        damping = self._regularization(R) ** 0.5 * torch.eye(len(norms), dtype=r.dtype)
        matrix = torch.cat([R / norms, damping])
        target = torch.cat([r, r.new_zeros(len(norms))])
        # gelsd: the solution of least norm, so that columns that say nothing get nothing.
        return torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0] / norms

    def _regularization(self, R: Tensor) -> float:
        """Adaptive: of cycles, by the share of noise in R; 0 for a smooth path, 1 where consecutive columns have the
        cosine of white noise's differences, -1/2, and linear between."""
        if self.regularization != "adaptive":
            return float(self.regularization)
        share = (1 - self._smoothness(R, R.shape[1])) / (1 + 1 / 2)
        return 1e-12 + self.noise_regularization * min(share, 1.0) * self.cycle

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

    def _reason_to_skip(self, r: Tensor, R: Tensor, gain: float, loss_fn: Callable | None) -> str:
        if self.safeguard == "loss" and loss_fn is None:
            return "no_loss"
        cautious = self.safeguard == "descent"
        if cautious and not self.cycle and self._looks_noisy(R, self.pairs_since_jump - 1):
            return "noisy"
        if gain > self.max_gain:
            return "no_gain"
        if not cautious:
            return ""
        # As many columns as this explain some of any residual: the gain that n - columns free numbers would show.
        # Where the columns are more than half as many as the numbers, a gain shows nothing.
        n, columns = len(r), int((R.norm(dim=0) > 0).sum())
        most = self.max_gain if self.cycle else self.trusted_gain
        return "" if columns <= n / 2 and gain * (n / (n - columns)) ** 0.5 <= most else "no_gain"

    def _looks_noisy(self, R: Tensor, newest: int) -> bool:
        """By the changes since the last jump. One of them tells nothing; where only one is kept there is no telling."""
        unknown = R.shape[1] > 1 and newest < 2
        return unknown or self._smoothness(R, newest) < self.smooth

    def _smoothness(self, R: Tensor, newest: int) -> float:
        """Mean cosine between consecutive changes of the residual, over the newest; 1 if there are none."""
        changes = R.T[-newest:] if newest > 0 else []
        cosines = [torch.cosine_similarity(a, b, dim=0) for a, b in pairwise(changes) if a.any() and b.any()]
        return torch.stack(cosines).mean().item() if cosines else 1.0

    def _judge(self, candidate: Tensor, w: Tensor, r: Tensor, W: Tensor, loss_fn: Callable | None) -> str:
        if not candidate.isfinite().all():
            return "nonfinite"
        if (candidate - w).norm() > self.max_jump * W.norm(dim=0).sum():
            return "too_long"
        if self.safeguard == "descent":  # further along the residual than the plain step
            return "accepted" if (candidate - w) @ r > r @ r * self._lead() else "descent"
        if self.safeguard == "residual":
            return "pending"
        return self._judge_by_loss(candidate, loss_fn) if loss_fn and self.safeguard == "loss" else "accepted"

    def _lead(self) -> float:
        """How much further the last iterate of a steady cycle is than the mean of the last ``average_window``."""
        positions = range(1, self.period + 1)[-self.average_window :] if self.cycle and self.average_window else [1]
        return positions[-1] / (sum(positions) / len(positions))

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
        base_state = {p: copy.deepcopy(self.base.state[p]) for p, _ in self._parameters() if p in self.base.state}
        self.pending = Pending(jump, self._read(), self.pairs[-1].rn.norm(), base_state)
        self._write(jump)

    def _settle(self, pending: Pending, r: Tensor, lr: Tensor) -> bool:
        """Accept the pending jump if the residual fell; else go back to where it was made."""
        self.pending = None
        assert self.last  # the acceleration that made the jump
        if self._per_scale(r, lr).norm() < pending.norm:
            self.last["cause"] = "accepted"
            self._renew_base_state()
            self._restart_window(pending.jump)
            return True
        self.last["cause"] = "residual"
        self._write(pending.u)
        for p, _ in self._parameters():
            self.base.state.pop(p, None)
        self.base.state.update(pending.base_state)
        self._push(pending.u)
        return False

    def _accept(self, jump: Tensor) -> None:
        self._write(jump)
        self._renew_base_state()

    def _renew_base_state(self) -> None:
        self.pairs_since_jump = 0
        if self.on_accept != "reset_momentum":
            return
        for state in [self.base.state[p] for p, _ in self._parameters() if p in self.base.state]:
            for name in FIRST_MOMENTS:
                if isinstance(state.get(name), Tensor):
                    state[name].zero_()

    # Averaging

    def _average(self, jump: Tensor | None, u: Tensor, r: Tensor) -> None:
        if jump is None:
            self._push(u)
        else:
            self._restart_window(jump)
        if 0 < len(self.window) == self.average_window and self._noisy(r):
            self._write(torch.stack(self.window).mean(0))

    def _restart_window(self, jump: Tensor) -> None:
        # A mean across a jump would undo most of it; at period 1 every point is a jump and all are kept.
        if self.period > 1:
            self.window = []
        self._push(jump)

    def _push(self, point: Tensor) -> None:
        self.window = [*self.window, point][-self.average_window :] if self.average_window else []

    def _noisy(self, r: Tensor) -> bool:
        points = torch.stack(self.window)
        variance = detrended_variance(points) if self.average_criterion == "detrended" else points.var(0, correction=0)
        return bool(variance.sqrt().max() > self.average_tolerance * r.abs().max())

    # Parameters

    def _parameters(self) -> list[tuple[Tensor, float]]:
        """Those that take part, with their learning rates."""
        groups = [group for group in self.base.param_groups if group.get("anderson", True)]
        return [(p, float(group["lr"])) for group in groups for p in group["params"]]

    def _read(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p, _ in self._parameters()])

    def _learning_rates(self) -> Tensor:
        return torch.cat([torch.full_like(p.detach().flatten(), lr) for p, lr in self._parameters()])

    @torch.no_grad()
    def _write(self, point: Tensor) -> None:
        parameters = [p for p, _ in self._parameters()]
        for p, part in zip(parameters, point.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


def detrended_variance(points: Tensor) -> Tensor:
    """Each column's residual sum of squares about its straight-line fit, over t - 2 degrees of freedom."""
    time = torch.arange(len(points), dtype=points.dtype)
    line = torch.stack([torch.ones_like(time), time], dim=1)
    misfit = points - line @ torch.linalg.lstsq(line, points).solution
    return misfit.square().sum(0) / (len(points) - 2)
