"""The optimizers that methods are made of, each from parameters and a learning rate.

Optional packages are imported when a run needs them, as one of them takes seconds to import.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, Optimizer

Build = Callable[[Iterable[nn.Parameter], float], Optimizer]
LABELS = {"sgd": "SGD", "nesterov": "Nesterov", "adam": "Adam"}
"""The bases that any task can be trained with, and their names in tables."""
ADVICE = {"AADL": "put ORNL's AADL on PYTHONPATH"}
"""How to install packages that pip does not find in the extra ``surrogates``."""


def sgd(parameters: Iterable[nn.Parameter], rate: float, **options: Any) -> Optimizer:
    """SGD."""
    return SGD(parameters, lr=rate, **options)


def adam(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """Adam."""
    return Adam(parameters, lr=rate)


def soap(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """SOAP, without weight decay as the bases have none."""
    from pytorch_optimizer import SOAP

    return SOAP(parameters, lr=rate, weight_decay=0.0)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Build] = {
    "sgd": sgd,
    "nesterov": partial(sgd, momentum=0.9, nesterov=True),
    "adam": adam,
    "soap": soap,
}


def build(name: str, parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """A base by its name; raises ``ValueError``."""
    if name not in OPTIMIZERS:
        raise ValueError(f"Invalid optimizer: {name!r}. Allowed: {', '.join(map(repr, sorted(LABELS)))}.")
    return OPTIMIZERS[name](parameters, rate)


def muon(model: nn.Module, rate: float) -> Optimizer:
    """Muon, whose steps are scaled to the size of AdamW's, so that one rate suits both parts.

    Matrices before the output layer, which it is made for, are in its first group; its AdamW has the rest.
    """
    from pytorch_optimizer import Muon

    *matrices, head = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [head, *(parameter for parameter in model.parameters() if parameter.ndim != 2)]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return Muon(groups, lr=rate, adamw_lr=rate, use_adjusted_lr=True)  # type: ignore[no-any-return]


def accelerate(base: Optimizer, **options: Any) -> Optimizer:
    """The base, accelerated in place by the paper's own implementation."""
    import AADL

    AADL.accelerate(base, acceleration_type="anderson", **options)
    return base


def missing(name: str, needs: Sequence[str]) -> str:
    """Why a problem or method cannot run here; empty if it can."""
    absent = [package for package in needs if find_spec(package) is None]
    if not absent:
        return ""
    advice = ADVICE.get(absent[0], 'pip install -e ".[surrogates]"')
    return f"{name} is left out: no module {', '.join(absent)} ({advice})."
