"""The discrepancy drives: outputs of the model beside the present weights tell which way to jump."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .directions import DirectionBlock
from .discrepancy import Model, Outputs, Unusable
from .driver import Batch, Driver
from .evaluation import leaving_no_trace, without_graph
from .ledger import Ledger
from .mixture import Mixture
from .options import POWERS, Options
from .parameters import build_blocks
from .probing import WROTE, Probe, agreeing
from .safeguard import Decision
from .stats import COUNTS, Acceleration
from .subspace import chosen, held_out_gain, minimize, next_damping, promised_fall, reduced, total

DAMPINGS = 6
"""Each ten times the one before: tried for the half that is held out, which takes no forward pass."""
TRIES = 3
"""Jumps that are tried with more and more damping before an acceleration is given up."""
EVALUATION_SHARE = 0.05
"""Of the cost, for weights to evaluate with."""
HALF = 1e-4
"""Outputs that are rounded more coarsely are in half precision."""
REPEATABLE = 1e-3
"""Two evaluations at the same weights may differ by this part of the outputs."""
ENOUGH = 0.9
"""Of the promised fall: what the newer half of the differences must promise to be taken alone ..."""
SCARCE = 0.7
"""... and below which more of them are tried."""
LOST, KEPT = 0.5, 0.1
"""Parts of a jump's gain: where more is lost until the next one, the batch doubles; where less, it halves."""
FEWEST = 2
"""Differences among the directions."""
NO_OUTPUTS = "step() was given no outputs; give them with step(outputs=...) or set_batch(outputs=...)"


class DiscrepancyDriver(Driver[DirectionBlock]):
    """Gauss and Newton's method in the few directions that training has shown, with forward passes alone."""

    points = ("iterate", "stored", "averages")

    def __init__(self, base: Optimizer, options: Options):
        super().__init__(base, options)
        assert options.discrepancy is not None
        self.settings = options.discrepancy
        self.ledger = Ledger.opened(self.settings.budget, self.settings.period)
        self.mixture = Mixture(1 + len(POWERS))
        self.damping = self.settings.damping
        self.width = self.settings.history_size  # differences in use
        self.batches = 1  # whose samples the next acceleration looks at
        self.stores = 0  # iterates stored so far; the first makes no difference yet
        self.jumped = 0
        self.averaged = 0
        self.since_jump = 0  # base steps since the last acceleration
        self.since_mixture = 0
        self.suspicious = True  # whether to check that outputs are repeatable
        self.stats.gauges = self._gauges

    # ------------------------------------------------------------------------------------------ the algorithm

    def accelerated_step(self, closure: Callable[[], Any] | None, batch: Batch) -> Any:
        """One base step, then a jump where the model's outputs show a better place."""
        due = self._jump_is_due()
        if due:
            self._keep_iterates()
        if self._mixture_is_due():
            ahead = self.next_batch.outputs
            closure = self._learning(closure, ahead if batch.outputs is None else batch.outputs)
        loss, batch = self.base_step(closure, batch)
        if due:
            self._refresh()
        if not self._moved(due):
            return loss
        self.k += 1
        self.since_jump += 1
        self.since_mixture += 1
        self._show()
        if self.k > self.settings.warmup and self.k % self.settings.store_period == 0:
            self._store()
        if due:
            self._accelerate(batch.outputs)
        return loss

    def _jump_is_due(self) -> bool:
        return self.settings.trains and self.stores > FEWEST and self.since_jump + 1 >= self.ledger.wait

    def _keep_iterates(self) -> None:
        self.ensure_blocks()
        for block in self.blocks:
            block.keep_iterate()

    def _store(self) -> None:
        """Add the difference from the iterate stored before, and take the present one into the averages."""
        self.ensure_blocks()
        self._refresh()
        if self.settings.trains:
            row = (self.stores - 1) % self.settings.history_size
            for block in self.blocks:
                block.store_difference(row) if self.stores else block.keep_stored()
            self.stores += 1
        if self.settings.evaluates:
            self.averaged += 1
            for block in self.blocks:
                block.average(self.averaged)

    def _accelerate(self, outputs: Callable[..., Any] | None) -> None:
        """Look along the directions and jump; whatever goes wrong, the weights are those of the plain step."""
        if outputs is None:
            self._report(Unusable("no_outputs", NO_OUTPUTS))
            return
        rows = self._rows()
        if not rows:
            self._skip("converged")
            return
        conclusion = None
        with self._probing(outputs, self.batches) as probe:
            try:
                conclusion = self._jump(probe, rows)
            except Unusable as problem:
                self._give_up(problem)
        self.since_jump = 0
        if conclusion:  # hooks and momentum find parameters as they are trained
            self._conclude(*conclusion)

    def _rows(self) -> list[int]:
        """The directions in use: the present step, the gradient, differences from the newest on, and jumps."""
        m, j = self.settings.history_size, self.settings.jumps
        held = min(self.stores - 1, self.width)
        differences = [(self.stores - 2 - i) % m for i in range(held)]
        jumps = [m + i for i in range(min(self.jumped, j))]
        for block in self.blocks:
            block.store_step(m + j)
            block.store_gradient(m + j + 1)
        lengths = self._lengths()
        made_of_batch = [] if self.settings.splits else [m + j, m + j + 1]  # both halves are in them
        return [row for row in (*made_of_batch, *differences, *jumps) if 0 < lengths[row] < inf]

    def _lengths(self) -> list[float]:
        """Of all rows, over all blocks and ranks."""
        return self._norms([block.lengths_sq for block in self.blocks]).tolist()

    def _norms(self, squares: list[Tensor]) -> Tensor:
        """Square roots of sums over the blocks, each with its own, and over ranks."""
        parts = [block.copy_weight * square.cpu() for block, square in zip(self.blocks, squares, strict=True)]
        return self.ranks.sum(torch.stack(parts).sum(0)).sqrt()

    def _jump(self, probe: Probe, rows: list[int]) -> tuple[Decision, Callable[[], Acceleration]]:
        """Model the outputs along the rows, and try the best combination of them with growing damping."""
        lengths = self._lengths()
        start = self._start(probe)
        columns = self._columns(probe, start, rows, lengths)
        model = reduced(start.misfit.model(start.values, columns), self.ranks.mean)
        before = float(total(model).loss)
        promised = loss = before
        coefficients = columns.new_zeros(len(rows))
        decision = Decision(False, "held_out")
        for _ in range(TRIES if self._helps_other_half(model) else 0):
            coefficients, promised = minimize(start.misfit, start.values, columns, model, self.damping, self.ranks.mean)
            by_row = self._by_row(rows, lengths, coefficients)
            loss = self._try(probe, by_row)
            decision = Decision(loss < before, "" if loss < before else "loss")
            self.damping = next_damping(self.damping, before - promised, before - loss)
            if decision.accepted:
                self._arrive(by_row)
                break
        after = loss if decision.accepted else before
        self._adapt_width(model, rows)
        self._adapt_batches(self.ledger.lost(before), decision)
        cost = probe.count * self.settings.forward_cost
        self.ledger.enter(cost, before, after, self.since_jump, self.settings.period)
        self.suspicious = not decision.accepted
        self.stats.counts["attempted"] += 1
        return decision, partial(_describe, self.k, before, promised, coefficients, decision.cause)

    def _helps_other_half(self, model: Model) -> bool:
        """Whether what fits one half of the batch helps the other, with as much damping as it takes."""
        if not self.settings.splits:
            return True
        for _ in range(DAMPINGS):
            if held_out_gain(model, self.damping) > 0:
                return True
            self.damping = next_damping(self.damping, 0.0, 0.0)
        return False

    def _start(self, probe: Probe) -> Outputs:
        """The outputs at the present weights, twice where they may be random."""
        start = probe()
        if self.suspicious:
            again = probe()
            with agreeing(self.ranks):
                self._check_repeatable(start, again)
        return start

    def _check_repeatable(self, start: Outputs, again: Outputs) -> None:
        self._refresh()
        if not all(torch.equal(block.read(0, block.n), block.iterate) for block in self.blocks):
            raise Unusable("outputs_wrote", WROTE)  # through .data, which leaves no other trace
        apart = float(torch.linalg.vector_norm(again.values - start.values))
        if apart > REPEATABLE * float(torch.linalg.vector_norm(start.values)):
            raise Unusable("random_outputs", "outputs returned other numbers when called again at the same weights")

    def _columns(self, probe: Probe, start: Outputs, rows: list[int], lengths: list[float]) -> Tensor:
        """How the outputs change along each row, per unit of length."""
        squares = [torch.linalg.vector_norm(block.iterate, dtype=torch.float64).square() for block in self.blocks]
        size = float(self._norms(squares)) or 1.0
        tiny = size * max(probe.eps, *(torch.finfo(block.params[0].dtype).eps for block in self.blocks)) ** 0.4
        secant = self.settings.probe == "secant" or probe.eps > HALF
        columns = []
        for row in rows:
            distance = lengths[row] if secant else tiny
            self._place(lambda block, row=row, d=distance: torch.add(  # type: ignore[misc]
                block.iterate, block.directions[row], alpha=d / lengths[row]))  # fmt: skip
            columns.append((probe().values - start.values) / distance)
        return torch.stack(columns)

    def _place(self, vector: Callable[[DirectionBlock], Tensor]) -> None:
        """Set the weights, all of them: gradients are put away while outputs are evaluated."""
        self._write([vector(block) for block in self.blocks], everything=True)

    def _by_row(self, rows: list[int], lengths: list[float], coefficients: Tensor) -> dict[int, float]:
        """Coefficients of whole rows."""
        return {row: x / lengths[row] for row, x in zip(rows, coefficients.tolist(), strict=True)}

    def _try(self, probe: Probe, by_row: dict[int, float]) -> float:
        """The loss at the weights to which these coefficients lead, which are left in place."""
        self._place(lambda block: block.iterate + block.combine(by_row))
        try:
            outputs = probe()
            loss = outputs.misfit.loss(outputs.values)
        except Unusable as problem:
            if problem.cause != "nonfinite_outputs":
                raise
            loss = inf  # no better place
        return float(self.ranks.mean(torch.tensor(loss, dtype=torch.float64)))

    def _arrive(self, by_row: dict[int, float]) -> None:
        """Keep the jump as a direction, and measure the next difference from here."""
        row = self.settings.history_size + self.jumped % max(self.settings.jumps, 1)
        for block in self.blocks:
            jump = block.combine(by_row)
            block.iterate.add_(jump)
            if self.settings.jumps:
                block.store_row(row, jump)
            block.keep_stored()
        self.jumped += 1

    def _adapt_width(self, model: Model, rows: list[int]) -> None:
        """Half of the differences if the newer half promises nearly as much, twice as many if far less."""
        m = self.settings.history_size
        held = sum(row < m for row in rows)
        newer = [row for row in rows if row < m][: held // 2]
        fewer = chosen(model, [i for i, row in enumerate(rows) if row in newer or row >= m])
        part = promised_fall(fewer, self.damping) / max(promised_fall(model, self.damping), 1e-300)
        if part >= ENOUGH:
            self.width = max(held // 2, FEWEST)
        elif part < SCARCE:
            self.width = min(self.width * 2, m)

    def _adapt_batches(self, lost: float, decision: Decision) -> None:
        """Twice as many if noise was fitted, by the jump before or in one of two halves; half if that jump was kept."""
        if lost > LOST or decision.cause == "held_out":
            self.batches = min(2 * self.batches, self.settings.most_batches)
        elif lost < KEPT:
            self.batches = max(self.batches // 2, 1)

    def _gauges(self) -> dict[str, float]:
        found = {"share": self.ledger.share, "wait": self.ledger.wait, "damping": self.damping}
        return found | {"differences": self.width, "batches": self.batches}

    def _report(self, problem: Unusable) -> None:
        self._skip(problem.cause)
        self.tell_once(f"Anderson makes plain steps: {problem}.", logging.WARNING)

    def _give_up(self, problem: Unusable) -> None:
        self._report(problem)
        self.ledger.postpone(self.settings.period)
        self.suspicious = True

    @contextmanager
    def _probing(self, outputs: Callable[..., Any], batches: int) -> Iterator[Probe]:
        """Evaluate at will: at the end, or at an error, the weights are ``iterate`` and all else is as it was."""
        params = [p for group in self.base.param_groups for p in group["params"]]
        with leaving_no_trace(params) as rewind, without_graph(params):
            probe = Probe(outputs, self.settings, batches, params, rewind, self.ranks)
            try:
                yield probe
            finally:
                self.stats.counts["extra_evaluations"] += probe.count
                self._refresh()
                self._place(lambda block: block.iterate)

    # ------------------------------------------------------------------------------ weights to evaluate with

    def _mixture_is_due(self) -> bool:
        cost = (1 + len(POWERS)) * self.settings.forward_cost
        return self.settings.evaluates and self.averaged > 0 and self.since_mixture * EVALUATION_SHARE >= cost

    def _learning(
        self, closure: Callable[[], Any] | None, outputs: Callable[..., Any] | None
    ) -> Callable[[], Any] | None:
        """Learn from the batch now, or where only the closure gives it, there; returns the closure to train with."""
        if outputs is not None or closure is None:
            self._learn_mixture(outputs)
            return closure

        def learning() -> Any:
            loss = closure()
            if self._mixture_is_due():  # at the first of several calls
                self._learn_mixture(self.next_batch.outputs)
            return loss

        return learning

    def _learn_mixture(self, outputs: Callable[..., Any] | None) -> None:
        """Let the batch judge present weights and averages, before it is trained on."""
        self.since_mixture = 0
        if outputs is None:
            self._report(Unusable("no_outputs", NO_OUTPUTS))
            return
        self._keep_iterates()
        with self._probing(outputs, batches=1) as probe:
            try:
                found = [probe()]
                for i in range(len(POWERS)):
                    self._place(lambda block, i=i: block.averages[i])  # type: ignore[misc]
                    found.append(probe())
                self.mixture.learn(found, self.ranks.mean)
            except Unusable as problem:
                self._report(problem)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The mixture in place of the present weights."""
        self.ensure_blocks()
        kept = [block.read(0, block.n).clone() for block in self.blocks]
        if self.averaged:
            self._place(lambda block: block.mixture(self.mixture.shares))
        try:
            yield
        finally:
            self._refresh()
            self._write(kept, everything=True)

    # --------------------------------------------------------------------------------------------- lifecycle

    def build_blocks(self) -> list[DirectionBlock]:
        """Without a direction."""
        rows, averages = (count for _, count in self.options.rows.values())
        return build_blocks(
            self.base.param_groups, DirectionBlock, self.ranks, self.storage.shard, rows=rows, averages=averages
        )

    def cancel(self) -> None:
        """Nothing is under way between two steps."""

    def _forget(self) -> None:
        self.stores = self.jumped = self.averaged = 0
        self.ledger = Ledger.opened(self.settings.budget, self.settings.period)
        self.damping, self.width, self.batches = self.settings.damping, self.settings.history_size, 1
        self.suspicious = True
        super()._forget()

    def numbers(self, block: DirectionBlock) -> list[float]:
        """Progress, the ledger, the mixture and counters."""
        progress = [self.k, self.stores, self.jumped, self.averaged, self.since_jump, self.since_mixture]
        kept = [self.width, self.batches, self.damping, float(self.suspicious)]
        counts = [float(self.stats.counts[name]) for name in COUNTS]
        return [self.options.cycle_length, *progress, *kept, *self.ledger.numbers(), *self.mixture.numbers(), *counts]

    def set_numbers(self, block: DirectionBlock, numbers: Sequence[float]) -> None:
        """From a checkpoint."""
        rest = iter(numbers[1:])
        self.k, self.stores, self.jumped, self.averaged, self.since_jump, self.since_mixture = map(int, islice(rest, 6))
        self.width, self.batches = map(int, islice(rest, 2))
        self.damping, suspicious = islice(rest, 2)
        self.suspicious = bool(suspicious)
        self.ledger = Ledger.from_numbers(list(islice(rest, 8)))
        self.mixture.set_numbers(list(islice(rest, 2 + len(POWERS))))
        self.stats.set_counts(islice(rest, len(COUNTS)))


def _describe(step: int, before: float, promised: float, coefficients: Tensor, cause: str) -> Acceleration:
    """Losses are squares of residuals as far as a record goes."""
    now, then = (sqrt(x) if isfinite(x) and x > 0 else 0.0 for x in (before, promised))
    directions, norm = len(coefficients), float(torch.linalg.vector_norm(coefficients))
    return Acceleration(step, now, then, directions, directions, norm, cause=cause)
