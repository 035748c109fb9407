"""Networks in single precision, and large ones: what they keep, and the memory that they need."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.optim import Adam
from training import assert_same, weights

from torch_anderson import GaussNewton, Objective, Term
from torch_anderson._gauss_newton.control import State


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))


def decay(u, t):
    return grad(u)(t).sum() + u(t)


def problem(model):
    """u' = -u, u(0) = 1, at samples that are numbers of single precision in either type."""
    dtype = model[0].weight.dtype
    return Objective(
        model,
        inside=Term(decay, lambda count: torch.rand(count, 1, dtype=torch.float32).to(dtype), count=60),
        start=Term(lambda u, t: u(t) - 1, torch.zeros(1, 1, dtype=dtype)),
    )


def train(model, optimizer, objective, steps):
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.step(objective)


def driven(model):
    return model, GaussNewton(Adam(model.parameters(), lr=1e-3)), problem(model)


def master(run):
    """The weights that the optimizer keeps in float64, in the order of the parameters."""
    driver = run[1]._driver
    return driver.space.gather(driver.weights, driver.traces[0].params)


@pytest.fixture
def only_jumps(monkeypatch):
    """No steps of the base, to compare with."""
    monkeypatch.setattr(State, "compares", False)


def test_a_network_in_single_precision_makes_the_jumps_of_one_in_double(only_jumps):
    """The weights in float64 survive between jumps; those of the model are the same, rounded."""
    torch.manual_seed(1)
    single = driven(network())
    torch.manual_seed(1)
    double = driven(network().double())
    for run in (single, double):
        torch.manual_seed(2)
        run[1].step(run[2])
        train(*run, 25)
    expected = torch.cat([p.detach().reshape(-1) for p in double[0].parameters()])
    torch.testing.assert_close(master(single), expected, rtol=1e-6, atol=1e-6)
    rounded = torch.cat([p.detach().reshape(-1) for p in single[0].parameters()])
    assert torch.equal(rounded, master(single).float())
    assert not torch.equal(rounded.double(), master(single))


def test_weights_that_somebody_else_wrote_replace_those_in_double(only_jumps):
    run = driven(network())
    run[1].step(run[2])
    train(*run, 3)
    with torch.no_grad():
        run[0][0].bias[0] += 1e-3
    written = torch.cat([p.detach().reshape(-1) for p in run[0].parameters()]).double()
    driver = run[1]._driver
    assert torch.equal(driver.current_weights(driver.traces[0]), written)


def test_a_checkpoint_has_the_weights_in_double(only_jumps):
    run = driven(network())
    run[1].step(run[2])
    train(*run, 7)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in run], file)
    file.seek(0)
    twin = driven(network())
    for part, state in zip(twin, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for one in (run, twin):
        train(*one, 5)
    assert torch.equal(master(run), master(twin))
    assert_same(weights(run[0]), weights(twin[0]))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(2, 200), nn.Tanh(), nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 1)
        ).double()

    def forward(self, x):
        return self.layers(x)


def test_a_large_network_jumps_alike_from_factors_and_from_dense_rows():
    points = torch.rand(40, 2, dtype=torch.float64)

    def run(dense):
        model = Wide()
        objective = Objective(model, only=Term(lambda u, x: grad(u)(x)[0] + u(x) - x.sum(), points))
        optimizer = GaussNewton(Adam(model.parameters(), lr=1e-3))
        optimizer.step(objective)
        residuals = optimizer._driver.traces[0]
        if dense:
            residuals.layout = residuals.layout.as_dense()
        assert residuals.layout.factored != dense
        losses = [float(optimizer.step(objective)) for _ in range(2)]
        return losses, copy.deepcopy(weights(model))

    (found, ours), (expected, theirs) = run(dense=False), run(dense=True)
    assert found == pytest.approx(expected, rel=1e-6) and found[-1] < found[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


MILLION = """
import resource, torch
from torch import nn
from torch.func import grad, jvp
from torch_anderson import GaussNewton, Objective, Term
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
layers = [nn.Linear(2, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh()]
model = nn.Sequential(*layers, nn.Linear(700, 1))
def bend(u, x):
    along = torch.tensor([1.0, 0.0])
    return (jvp(grad(u), (x,), (along,))[1] @ along) + u(x)
objective = Objective(model, only=Term(bend, lambda count: torch.rand(count, 2), count=768))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
optimizer = GaussNewton(torch.optim.Adam(model.parameters()))
first, *_, last = [float(optimizer.step(objective)) for _ in range(3)]
assert optimizer.stats.counts["accepted"] and last < first
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in kilobytes, as Linux does")
def test_a_million_weights_take_less_than_a_gigabyte():
    done = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0
