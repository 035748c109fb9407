"""What a task is: settings, and the live problem that a seed makes of them.

To add a task, subclass ``Task`` and ``Problem`` in a module of ``tasks/`` and name it in the table there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor, nn

from torch_anderson import Anderson

Metrics = dict[str, float]
NOT_OPTIONS_OF_A_TASK = ("base", "discrepancy", "storage")
ANDERSON_OPTIONS = tuple(name for name in signature(Anderson).parameters if name not in NOT_OPTIONS_OF_A_TASK)


class Problem(ABC):
    """One task with one seed: a model with its first weights, and data. The same for every method."""

    model: nn.Module

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """The training loss on the batch that belongs to this step (from 0), at the model's present weights.

        The batch depends on the seed and the step alone, so that all methods see the same ones and a run can resume.
        """

    @abstractmethod
    def outputs(self, step: int, factor: int = 1) -> tuple[Tensor, ...]:
        """What the discrepancy compares on that batch: (predictions, targets), or residuals where they shall be zero.

        The mean of squares or the cross-entropy of them, as ``Task.discrepancy`` says, is the loss. With a ``factor``
        above 1, on a fresh batch so many times as large, which depends on the seed and the step alone as well.
        """

    @abstractmethod
    def evaluate(self) -> Metrics:
        """Validation metrics at the model's present weights; ``Task.metric`` is among them."""

    def references(self) -> dict[str, Metrics]:
        """What to compare with that is not trained: name of the predictor -> its metrics."""
        return {}

    def pictures(self) -> dict[str, NDArray[Any]]:
        """Arrays to draw of the trained model, by name; a task without pictures has none."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Settings of a task: the defaults are those of the ``paper`` profile, ``quick`` says what is smaller there."""

    name: ClassVar[str]
    """As on the command line."""
    title: ClassVar[str]
    """As in headings."""
    metric: ClassVar[str]
    """The metric that methods are compared by; lower is better."""
    metrics: ClassVar[Mapping[str, str]]
    """All that ``Problem.evaluate`` returns, with a label for each."""
    quick: ClassVar[Mapping[str, Any]]
    """Settings of the quick profile that differ."""
    discrepancy: ClassVar[str]
    """How the loss follows from ``Problem.outputs``: as in ``torch_anderson.Discrepancy``."""
    pinn: ClassVar[bool] = False
    """Whether it is a physics-informed network: L-BFGS is a peer there."""

    steps: int
    """Gradient evaluations in a run."""
    learning_rate: float
    """Of the base optimizer at the start."""
    decay_factor: float = 1.0
    """The learning rate is multiplied by this ..."""
    decay_every: int = 0
    """... each time so many steps have been made; 0 for never."""
    evaluate_every: int = 10
    """Steps between two evaluations."""
    optimizer: str = "adam"
    """The base optimizer: adam, nesterov (momentum 0.9) or sgd."""
    forward_cost: float = 1 / 3
    """Of ``Problem.outputs`` without a graph, in gradients."""
    probe_factor: int = 1
    """Size of the batch that accelerations by the discrepancy look at, in batches; 1 for the step's own."""
    most_batches: int = 1
    """Above 1, the discrepancy chooses that size by itself, up to this."""
    tol: float = 0.0
    """Stop when the loss on a batch is below this (the paper's stop test)."""

    # Anderson as the paper sets it for this task; see `torch_anderson.Anderson`.
    history_size: int
    period: int
    store_period: int
    relaxation: float
    average_window: int
    """Used by the methods with an average only."""
    average_tolerance: float = 0.1
    average_criterion: str = "paper"
    safeguard: str | None = "residual"
    mixing: str = "paper"
    warmup: int = 0
    residual: str = "step"
    regularization: float = 1e-12
    solver: str = "gram"
    max_jump: float = 2.0
    on_accept: str = "keep"

    def __post_init__(self) -> None:
        if self.probe_factor < 1:
            raise ValueError(f"Invalid probe_factor: {self.probe_factor}. Allowed: 1 and more batches.")
        if self.most_batches < 1 or (self.most_batches > 1 and self.probe_factor > 1):
            raise ValueError(f"Invalid most_batches: {self.most_batches}. Allowed: 1 and more, if probe_factor is 1.")

    @abstractmethod
    def start(self, seed: int) -> Problem:
        """The problem of this seed. The caller has seeded torch's global generator with it."""

    def rate_factor(self, step: int) -> float:
        """What the schedule multiplies the learning rate by at this step (from 0)."""
        return self.decay_factor ** (step // self.decay_every) if self.decay_every else 1.0

    def anderson_options(self) -> dict[str, Any]:
        """The fields that are options of ``Anderson``, average included."""
        return {name: getattr(self, name) for name in ANDERSON_OPTIONS}
