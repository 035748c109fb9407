"""Training on a device that is not the processor: the same bits, and checkpoints on the host.

The device is pretended (``pretended.py``): errors of placement show on any machine, and a run can be compared with one
on the processor bit for bit.
"""

import io
from copy import copy, deepcopy
from operator import is_

import pytest
import torch
from pretended import NAME as DEVICE
from pretended import allocated, counted, move, on_device
from torch import Tensor
from torch.utils._pytree import tree_map
from training import EAGER, FEW_BASES, assert_same, batch, counts, make_model, weights

from torch_anderson import Anderson, GaussNewton, MovingAverage, Objective, Storage, Term

STEPS = 30

# At least one value of every option; values are made in the process that has the device.
ANDERSON = {
    "Anderson": lambda: {},
    "gradients, history_size": lambda: {"history_size": 2},
    "gradients, period": lambda: {"period": 2},
    "gradients, warmup": lambda: {"warmup": 3},
    "gradients, any jump": lambda: {"safeguard": None},
    "gradients, storage dtype": lambda: {"storage": Storage(dtype=torch.bfloat16)},
    "gradients, storage shard": lambda: {"storage": Storage(shard=True)},
    "gradients, process_group": lambda: {"process_group": _group_of_one()},
    "steps": lambda: {"residual": "step"},
    "history_size": lambda: EAGER | {"history_size": 2},
    "period": lambda: EAGER | {"period": 4},
    "period 1": lambda: EAGER | {"period": 1},
    "store_period": lambda: EAGER | {"period": 4, "store_period": 2},
    "relaxation": lambda: EAGER | {"relaxation": 0.5},
    "warmup": lambda: EAGER | {"warmup": 5},
    "average": lambda: EAGER | {"average": MovingAverage(3, tolerance=1e-3)},
    "average, safeguard residual": lambda: EAGER | {"period": 1, "average": MovingAverage(3), "safeguard": "residual"},
    "regularization": lambda: EAGER | {"regularization": 1e-4},
    "max_jump": lambda: EAGER | {"max_jump": 0.5},
    "safeguard loss": lambda: EAGER | {"safeguard": "loss"},
    "safeguard residual": lambda: EAGER | {"period": 2, "safeguard": "residual"},
    "storage dtype": lambda: EAGER | {"storage": Storage(dtype=torch.bfloat16)},
    "storage shard": lambda: EAGER | {"storage": Storage(shard=True)},
    "process_group": lambda: EAGER | {"process_group": _group_of_one()},
}
GAUSS_NEWTON = {
    "GaussNewton": lambda: {},
    "GaussNewton process_group": lambda: {"process_group": _group_of_one()},
}
CASES = ANDERSON | GAUSS_NEWTON


def cases(names):
    return pytest.mark.parametrize("case", names)


def _group_of_one():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return torch.distributed.group.WORLD


# ------------------------------------------------------------------------------------------------------- training


class Training:
    """A model and its optimizer on a device; step i always sees the same samples."""

    def __init__(self, case, base, device, seed=0, **more):
        self.case, self.device, self.options = case, device, CASES[case]() | more
        self.model = make_model(seed).to(device)
        accelerator = Anderson if case in ANDERSON else GaussNewton
        self.optimizer = accelerator(FEW_BASES[base](self.model.parameters()), **self.options)
        self.objective = self._objective()

    def copied(self):
        other = copy(self)
        other.model, other.optimizer = deepcopy((self.model, self.optimizer))
        other.objective = other._objective()
        return other

    def move(self):
        move(self.model)
        self.device = DEVICE
        self.objective = self._objective()

    def run(self, start, stop):
        for i in range(start, stop):
            torch.manual_seed(i)  # GaussNewton shuffles samples
            self.samples = tuple(tensor.to(self.device) for tensor in batch(i))
            self.optimizer.step(self.objective) if self.objective else self._step()
        return self

    def _step(self):
        self.optimizer.zero_grad()
        self._loss().backward()
        if self.options.get("safeguard") == "loss":
            self.optimizer.step(loss_fn=self._loss)
        else:
            self.optimizer.step()

    def _loss(self):
        x, y = self.samples
        return (self.model(x) - y).square().mean()

    def _objective(self):
        """One term whose samples are drawn, and one whose samples are fixed."""
        if self.case not in GAUSS_NEWTON:
            return None
        fixed = tuple(tensor.to(self.device) for tensor in batch(1000))
        return Objective(
            self.model,
            drawn=Term(_difference, self._draw, count=16, retain=False),
            fixed=Term(_difference, fixed, weight=0.5),
        )

    def _draw(self, count):
        return tuple(tensor[:count] for tensor in self.samples)

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return self


def _difference(u, point, value):
    return u(point) - value.squeeze()


def assert_alike(ours, theirs):
    """The same weights bit for bit, wherever they are, and the same decisions."""
    assert_same(*([tensor.cpu() for tensor in weights(training.model)] for training in (ours, theirs)))
    found, expected = counts(ours.optimizer), counts(theirs.optimizer)
    assert found == expected, f"{found} instead of {expected}"


# ------------------------------------------------------------------------------------------------------- the bits


@pytest.mark.parametrize("base", FEW_BASES)
@cases(CASES)
@on_device
def test_every_option_trains_with_the_bits_of_the_processor(case, base):
    ours, theirs = (Training(case, base, device).run(0, STEPS) for device in (DEVICE, "cpu"))
    assert_alike(ours, theirs)
    assert all(param.device.type == DEVICE for param in ours.model.parameters())
    assert ours.optimizer.stats.counts["attempted"], "nothing was accelerated"


def moved(state):
    """A checkpoint whose tensors were copied to the host one by one."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, deepcopy(state))


def read_from_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


HOSTS = {"moved": moved, "file": read_from_a_file}


@pytest.mark.parametrize("to_host", HOSTS)
@cases(CASES)
@on_device
def test_every_option_resumes_from_a_checkpoint_on_the_host_with_the_same_bits(case, to_host):
    theirs = Training(case, "adam", "cpu").run(0, STEPS)
    saved = Training(case, "adam", DEVICE)
    for i in range(STEPS // 2):
        saved.run(i, i + 1)
        if i > STEPS // 2 - 5:  # each phase of a period
            state = HOSTS[to_host](saved.state())
            assert_alike(Training(case, "adam", DEVICE, seed=1).load(state).run(i + 1, STEPS), theirs)


@cases(CASES)
@on_device
def test_every_option_is_deep_copied_on_the_device(case):
    theirs = Training(case, "adam", "cpu").run(0, STEPS)
    ours = Training(case, "adam", DEVICE).run(0, STEPS // 2)
    assert_alike(ours.copied().run(STEPS // 2, STEPS), theirs)
    assert_alike(ours.run(STEPS // 2, STEPS), theirs)  # the copy has not trained in its memory


@cases(ANDERSON)
@on_device
def test_every_option_has_the_same_bits_with_its_history_on_the_host(case):
    storage = CASES[case]().get("storage", Storage())
    offloaded = Storage(device="cpu", dtype=storage.dtype, shard=storage.shard)
    ours = Training(case, "adam", DEVICE, storage=offloaded).run(0, STEPS)
    assert_alike(ours, Training(case, "adam", DEVICE).run(0, STEPS))


@cases(["Anderson", "steps"])
@on_device
def test_a_history_on_the_host_takes_no_memory_of_the_device(case):
    history_size, held = 8, {}
    for place in (None, "cpu"):
        before = allocated()
        training = Training(case, "sgd", DEVICE, history_size=history_size, storage=Storage(device=place))
        training.run(0, STEPS)
        held[place] = allocated() - before
    numbers = sum(param.numel() for param in training.model.parameters())
    assert held[None] - held["cpu"] >= 2 * history_size * numbers * 4, held  # two matrices in single precision


# ---------------------------------------------------------------------------------------- what moves between devices


@cases(CASES)
@on_device
def test_a_model_that_moves_to_the_device_takes_its_history_along(case):
    ours = Training(case, "sgd", "cpu").run(0, STEPS // 2)
    before = [*ours.model.parameters()]
    ours.move()
    assert all(map(is_, before, ours.model.parameters()))
    assert_alike(ours.run(STEPS // 2, STEPS), Training(case, "sgd", "cpu").run(0, STEPS))


@pytest.mark.parametrize("base", ["momentum", "adam"])
@cases(["Anderson", "safeguard residual"])
@on_device
def test_a_base_with_moments_moves_by_loading_its_own_checkpoint(base, case):
    """torch moves the state of an optimizer to its parameters when a checkpoint is loaded."""
    ours = Training(case, base, "cpu").run(0, STEPS // 2)
    ours.move()
    ours.optimizer.load_state_dict(ours.optimizer.state_dict())
    assert_alike(ours.run(STEPS // 2, STEPS), Training(case, base, "cpu").run(0, STEPS))


@pytest.mark.parametrize("to_host", HOSTS)
@pytest.mark.parametrize("base", ["momentum", "adam"])
@pytest.mark.parametrize("case, cause", [("Anderson", "gradient"), ("safeguard residual", "residual")])
@on_device
def test_a_jump_is_taken_back_after_a_checkpoint_from_the_host(base, to_host, case, cause):
    theirs, rejected = Training(case, base, "cpu"), []
    for i in range(2 * STEPS):
        before = counts(theirs.optimizer).get(f"rejected_{cause}", 0)
        theirs.run(i, i + 1)
        rejected += [i] * (counts(theirs.optimizer).get(f"rejected_{cause}", 0) - before)
    assert rejected, "no jump was taken back"
    for i in rejected[:4]:
        state = HOSTS[to_host](Training(case, base, DEVICE).run(0, i).state())
        assert_alike(Training(case, base, DEVICE, seed=1).load(state).run(i, 2 * STEPS), theirs)


# --------------------------------------------------------------------------------------------- the device itself


MIXTURES = {
    "sum": lambda ours, theirs: ours + theirs,
    "product": lambda ours, theirs: torch.dot(theirs, ours),
    "list": lambda ours, theirs: torch.stack([ours[0], theirs[0]]),
    "foreach": lambda ours, theirs: torch._foreach_add([ours, theirs], 1.0),
    "result on the host": lambda ours, theirs: theirs[0].add_(ours[0]),
    "rows of the host": lambda ours, theirs: theirs[ours.long()],
}


@pytest.mark.parametrize("mixture", MIXTURES)
@on_device
def test_an_operation_on_tensors_of_both_devices_is_refused(mixture):
    with pytest.raises(RuntimeError, match="on the same device"):
        MIXTURES[mixture](torch.zeros(3, device=DEVICE), torch.zeros(3))


@on_device
def test_scalars_and_indices_may_come_from_the_host():
    ours = torch.arange(3.0, device=DEVICE)
    assert (ours * torch.tensor(2.0))[torch.tensor([2, 1])].tolist() == [4.0, 2.0]


@on_device
def test_costs_are_counted():
    with counted() as cost:
        ours = torch.tensor([1.0, 2.0], device=DEVICE)  # an upload, and a view that torch makes of it
        ours.add_(torch.ones(2).to(DEVICE))  # another one, an operation
        ours[:1].mul_(3)  # a view, an operation
        assert ours.sum().item() == 9  # two operations, the host waits
        torch.zeros(2).copy_(ours)  # a third, the host waits
    assert (cost.operations, cost.views, cost.waits, cost.uploads) == (5, 2, 2, 2), cost


def test_this_process_does_not_have_the_device():
    """Other tests must not see an accelerator that is not there."""
    with pytest.raises(RuntimeError):
        torch.device(DEVICE)
