"""Surrogates: networks that learn smooth tables from real engineering data."""

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_anderson import Term

from .case import Case, Problem, known, network

FLUID = "CarbonDioxide"
TEMPERATURES, PRESSURES = (310.0, 500.0), (1e6, 3e7)
"""Kelvin and pascal: above the critical temperature, where properties are smooth, steepest at 304 K and 7.4 MPa."""
STATES = 4000
TEST_SHARE = 0.25
Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and targets to train on, inputs and targets to test on."""


def split(inputs: NDArray[np.float64], targets: NDArray[np.float64]) -> Data:
    """Random rows for training and testing, the same for every seed; standardised by the former."""
    order = np.random.default_rng(0).permutation(len(inputs))
    test, train = np.split(order, [round(TEST_SHARE * len(order))])
    arrays = []
    for rows in (train, test):
        for values in (inputs, targets):
            arrays.append(torch.from_numpy((values[rows] - values[train].mean(0)) / values[train].std(0)))
    return arrays[0], arrays[1], arrays[2], arrays[3]


def regression(data: Data, width: int, depth: int) -> Case:
    """A network that learns the training rows and is judged on the others."""
    inputs, targets, points, expected = data
    model = network(inputs.shape[1], width, depth, targets.shape[1])
    return Case(model, {"fit": Term(known, (inputs, targets))}, points, expected, centred=True)


@cache
def fluid_states() -> Data:
    """Temperature and logarithm of pressure; density, enthalpy and speed of sound from CoolProp."""
    from CoolProp.CoolProp import PropsSI

    random = np.random.default_rng(1)
    temperature = random.uniform(*TEMPERATURES, STATES)
    logarithm = random.uniform(math.log(PRESSURES[0]), math.log(PRESSURES[1]), STATES)
    state = ("T", temperature, "P", np.exp(logarithm), FLUID)
    targets = np.stack([PropsSI(name, *state) for name in ("Dmass", "Hmass", "speed_of_sound")], 1)
    return split(np.stack([temperature, logarithm], 1), targets)


def fluid() -> Case:
    """Density, enthalpy and speed of sound of carbon dioxide (CoolProp) from temperature and pressure: 3,000 states to
    train on, 1,000 to test on, 310 to 500 K, 1 to 30 MPa. 3 layers of 32 neurons."""
    return regression(fluid_states(), 32, 3)


@cache
def engine_table() -> Data:
    """Mach number, altitude and throttle; thrust and fuel consumption, from the files that come with smt."""
    spec = find_spec("smt")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise ModuleNotFoundError("no module smt")
    folder = Path(places[0]) / "examples" / "b777_engine"
    inputs, targets = (np.loadtxt(folder / f"b777_engine_{name}.dat") for name in ("inputs", "outputs"))
    return split(inputs, targets)


def engine() -> Case:
    """Thrust and fuel consumption of a Boeing 777's engine from Mach number, altitude and throttle (a table of 1,056
    rows that comes with smt): 792 rows to train on, 264 to test on. 2 layers of 20 neurons."""
    return regression(engine_table(), 20, 2)


SURROGATES = (
    Problem(
        name="fluid", title="carbon dioxide (CoolProp)", group="surrogates", build=fluid, drawn=False,
        needs=("CoolProp",),
    ),
    Problem(
        name="engine", title="jet engine (smt)", group="surrogates", build=engine, drawn=False, needs=("smt",),
    ),
)  # fmt: skip
