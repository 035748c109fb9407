"""Tasks: settings, and the problem that they define with a seed.

To add a task, subclass ``Task`` and ``Problem`` in a module of ``tasks/`` and name it in the table there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor, nn

from torch_anderson import Anderson, MovingAverage, Objective

from .ranges import check_ranges

Metrics = dict[str, float]
NOT_SETTINGS = ("base", "residual", "average", "storage", "process_group")
"""Parameters of ``Anderson`` that no setting of a task is named after."""
SHARED_OPTIONS = tuple(name for name in signature(Anderson).parameters if name not in NOT_SETTINGS)
"""Options of ``Anderson`` that are settings of a task by the same name."""
ANDERSON_SETTINGS = (*SHARED_OPTIONS, "average_window", "average_tolerance")
"""All settings of a task that concern Anderson."""


class Problem(ABC):
    """A task with a seed: a model with its initial weights, and data; the same for every method."""

    model: nn.Module
    objective: Objective | None = None
    """The training loss by residuals of single samples, for jumps along the tangent; None if there is none."""

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """The training loss on the batch that belongs to this step (from 0), at the model's present weights.

        The batch depends only on the seed and the step, so that all methods use the same ones and a run can be resumed.
        """

    @abstractmethod
    def evaluate(self) -> Metrics:
        """Validation metrics at the model's present weights, including ``Task.metric``."""

    def references(self) -> dict[str, Metrics]:
        """Metrics of predictors that are not trained by us, by the predictor's name, for comparison."""
        return {}

    def pictures(self) -> dict[str, NDArray[Any]]:
        """Arrays to draw of the trained model, by name; a task without pictures has none."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Settings of a task. The defaults are those of the ``paper`` profile; ``quick`` has those that differ."""

    name: ClassVar[str]
    """The name on the command line."""
    title: ClassVar[str]
    """The title in headings."""
    metric: ClassVar[str]
    """The metric that methods are compared by; lower is better."""
    metrics: ClassVar[Mapping[str, str]]
    """All that ``Problem.evaluate`` returns, with a label for each."""
    quick: ClassVar[Mapping[str, Any]]
    """Settings of the quick profile that differ."""
    pinn: ClassVar[bool] = False
    """Whether it is a physics-informed network: L-BFGS is a peer there."""

    steps: int
    """Gradient evaluations in a run."""
    learning_rate: float
    """Initial learning rate of the base optimizer."""
    decay_factor: float = 1.0
    """The learning rate is multiplied by this ..."""
    decay_every: int = 0
    """... after every ``decay_every`` steps; 0 for never."""
    evaluate_every: int = 10
    """Steps between two evaluations."""
    optimizer: str = "adam"
    """The base optimizer: adam, nesterov (momentum 0.9) or sgd."""
    forward_cost: float = 1 / 3
    """Cost of ``Problem.loss`` without a graph, relative to a gradient evaluation."""
    tol: float = 0.0
    """Stop when the loss on a batch is below this (the paper's stop test)."""

    # Anderson as the paper sets it for this task; see `torch_anderson.Anderson`.
    history_size: int
    period: int
    store_period: int
    relaxation: float
    average_window: int
    """The window of ``MovingAverage``, 0 for none; used only by the methods with an average."""
    average_tolerance: float = 0.1
    safeguard: str | None = "residual"
    warmup: int = 0
    regularization: float = 1e-12
    max_jump: float = 2.0

    def __post_init__(self) -> None:
        check_ranges(self)

    @abstractmethod
    def start(self, seed: int) -> Problem:
        """The problem of this seed. The caller has seeded torch's global generator with it."""

    def rate_factor(self, step: int) -> float:
        """The factor of the learning rate at this step (from 0)."""
        return self.decay_factor ** (step // self.decay_every) if self.decay_every else 1.0

    def anderson_options(self) -> dict[str, Any]:
        """The options of ``Anderson`` that the settings amount to: the paper's method, with its average."""
        shared = {name: getattr(self, name) for name in SHARED_OPTIONS}
        return {"residual": "step", "average": self.average} | shared

    @property
    def average(self) -> MovingAverage | None:
        """The moving average of the settings; None for a window of 0."""
        if not self.average_window:
            return None
        return MovingAverage(self.average_window, tolerance=self.average_tolerance)
