"""``torch-anderson``, or ``python -m torch_anderson``: versions, devices and a self-check of a few seconds."""

import math
import sys
from collections.abc import Callable

import torch
from torch import nn

from . import Anderson, GaussNewton, Objective, Term, __version__, fixed_point


def main() -> int:
    """Print what is installed and check that it works; returns the exit code, 1 if a check fails."""
    if arguments := sys.argv[1:]:
        print(f"{__doc__}\nIt takes no arguments.")
        return 0 if arguments[0] in ("-h", "--help") else 2
    print(f"torch-anderson {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    passed = True
    for device in devices():
        print(description(device))
        for name, check in CHECKS.items():
            error, allowed = check(device)
            passed &= (good := error <= allowed)  # False for NaN
            print(f"  {'ok    ' if good else 'FAILED'}  {name}: error {error:.1e}, allowed {allowed:.0e}")
    return 0 if passed else 1


def devices() -> list[torch.device]:
    """The processor and all CUDA devices, which are those that have float64."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def description(device: torch.device) -> str:
    """One line about a device."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"{device}: {torch.get_num_threads()} threads"


def least_squares(device: torch.device) -> tuple[float, float]:
    """Distance to the exact solution of a linear least-squares problem, after 150 steps of ``Anderson`` on SGD."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 20, generator=generator, dtype=torch.float64).to(device)
    matrix *= torch.logspace(0, -1, 20, dtype=torch.float64, device=device)  # SGD alone would need thousands
    values = torch.randn(60, generator=generator, dtype=torch.float64).to(device)
    exact = torch.linalg.lstsq(matrix, values[:, None]).solution[:, 0]
    weights = nn.Parameter(torch.zeros(20, dtype=torch.float64, device=device))
    optimizer = Anderson(torch.optim.SGD([weights], lr=0.3))
    for _ in range(150):
        optimizer.zero_grad()
        (matrix @ weights - values).square().mean().backward()
        optimizer.step()
    return float((weights.detach() - exact).norm() / exact.norm()), 1e-6


def regression(device: torch.device) -> tuple[float, float]:
    """Largest error of a network that ``GaussNewton`` fits to the sine in 60 steps."""
    points = torch.linspace(-3, 3, 50, dtype=torch.float64, device=device)[:, None]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).to(points)
    objective = Objective(model, data=Term(lambda u, x, y: u(x) - y, (points, points.sin()[:, 0])))
    optimizer = GaussNewton(torch.optim.Adam(model.parameters()))
    for _ in range(60):
        optimizer.step(objective)
    with torch.no_grad():
        return float((model(points) - points.sin()).abs().max()), 1e-3


def cosine(device: torch.device) -> tuple[float, float]:
    """Distance of the solution of x = cos(x) that ``fixed_point`` finds from one that Newton's method finds."""
    x = 1.0
    for _ in range(10):
        x -= (x - math.cos(x)) / (1 + math.sin(x))
    solution = fixed_point(torch.cos, torch.ones(1, dtype=torch.float64, device=device), tol=1e-12)
    return abs(float(solution.x) - x), 1e-10


CHECKS: dict[str, Callable[[torch.device], tuple[float, float]]] = {
    "Anderson, least squares": least_squares,
    "GaussNewton, regression": regression,
    "fixed_point, x = cos(x)": cosine,
}
"""Each returns an error and the largest one that is allowed."""

if __name__ == "__main__":
    sys.exit(main())
