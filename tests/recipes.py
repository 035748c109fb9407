"""Hypothesis strategies: options of both accelerators, with bases and losses."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from worlds import Recipe

from torch_anderson import Anderson, GaussNewton, MovingAverage, Storage


def averages() -> st.SearchStrategy[MovingAverage]:
    tolerances = st.sampled_from([0.0, 0.1, 1.0])
    return st.builds(MovingAverage, st.integers(1, 5), tolerance=tolerances)


@st.composite
def step_options(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination that is allowed where residuals are steps."""
    return {
        "residual": "step",
        "period": draw(st.integers(1, 4)),
        "store_period": draw(st.integers(1, 4)),
        "history_size": draw(st.integers(1, 5)),
        "relaxation": draw(st.sampled_from([1.0, 0.7, 0.2])),
        "warmup": draw(st.sampled_from([0, 0, 1, 4])),
        "regularization": draw(st.sampled_from([1e-12, 0.0, 1e-4])),
        "max_jump": draw(st.sampled_from([0.5, 2.0, math.inf])),
        "safeguard": draw(st.sampled_from([None, "loss", "residual", "gradient", "gradient"])),
        "average": draw(st.none() | averages()),
    }


@st.composite
def gradient_options(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination that is allowed where residuals are gradients."""
    return {
        "residual": "gradient",
        "period": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "history_size": draw(st.integers(2, 5)),
        "warmup": draw(st.sampled_from([0, 0, 1, 4])),
        "safeguard": draw(st.sampled_from(["gradient", "gradient", None])),
    }


STORAGES = st.sampled_from([None, None, Storage(dtype=torch.bfloat16), Storage(device="cpu")])


@st.composite
def anderson_recipes(draw: st.DrawFn, bases: list[str]) -> Recipe:
    options = {**draw(step_options() | gradient_options()), "storage": draw(STORAGES)}
    return Recipe(draw(st.sampled_from(bases)), Anderson, options)


@st.composite
def gauss_newton_recipes(draw: st.DrawFn, bases: list[str]) -> Recipe:
    return Recipe(draw(st.sampled_from(bases)), GaussNewton, {})
