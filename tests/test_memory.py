"""What the wrapper keeps, and that an idle step touches nothing."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_anderson import Anderson, MovingAverage

M = 4
CONSTANT = 2_000


def parameters(n):
    torch.manual_seed(0)
    sizes = [n // 2, n // 3, n - n // 2 - n // 3]
    return [torch.nn.Parameter(torch.randn(size)) for size in sizes]


def train(optimizer, params, steps):
    for _ in range(steps):
        for p in params:
            p.grad = p.detach() + 0.1 * torch.randn_like(p)
        optimizer.step()


def kept_numbers(root):
    """Numbers in the distinct storages of all tensors reachable from `root`, other than parameters and gradients."""
    seen, todo, storages = set(), [root], {}
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, (type, torch.nn.Parameter)):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes() // found.element_size()
        elif isinstance(found, (dict, list, tuple, set)) or type(found).__module__.startswith("torch_anderson"):
            todo += gc.get_referents(found)
    return storages


@pytest.mark.parametrize("n", [3_000, 50_000])
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"residual": "step", "safeguard": None, "period": 3}, 2 * M + 4),  # rows, last residual and point, new pair
        ({"residual": "step", "safeguard": "loss"}, 2 * M + 4),
        ({"residual": "step", "safeguard": "residual"}, 2 * M + 6),  # and both ends of a jump
        ({"residual": "step"}, 2 * M + 8),  # and both gradients
        ({"residual": "step", "average": MovingAverage(5)}, 2 * M + 8 + 5),
        ({}, 2 * M + 6),  # as for steps: pairs of weights and gradients, and both ends of a jump
        ({"safeguard": None, "period": 3}, 2 * M + 6),
    ],
)
def test_no_more_vectors_are_kept_than_promised(n, options, rows):
    params = parameters(n)
    optimizer = Anderson(torch.optim.SGD(params, lr=0.1), history_size=M, **options)
    train(optimizer, params, steps=30)
    kept = kept_numbers(optimizer._driver)
    for p in params:  # reached through the views of the parameters; they are not ours
        kept.pop(p.untyped_storage().data_ptr(), None)
    assert n * (2 * M + 4) <= sum(kept.values()) <= n * rows + CONSTANT


class Operations(TorchDispatchMode):
    """Names of all tensor operations within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def operations_of_a_step(optimizer, params):
    train(optimizer, params, steps=5)  # the next one neither stores nor accelerates; gradients were found to be noise
    with Operations() as operations:
        optimizer.step()
    return [name for name in operations.names if not name.startswith("profiler.")]


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("options", [{"residual": "step", "period": 4, "store_period": 4}, {}], ids=["step", "resting"])
def test_an_idle_step_does_nothing_beyond_the_base(base, options):
    plain, wrapped = parameters(100), parameters(100)
    expected = operations_of_a_step(base(plain, lr=1e-3), plain)
    assert operations_of_a_step(Anderson(base(wrapped, lr=1e-3), **options), wrapped) == expected
