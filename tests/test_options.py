"""The validator that all options pass: what it converts, and what it refuses in which words."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from torch_anderson._options import choice, integer, real


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.asarray(3), torch.tensor(3)], ids=repr)
def test_integer_of_any_kind_becomes_an_int(value):
    checked = integer("period", value, least=3)
    assert type(checked) is int and checked == 3


@pytest.mark.parametrize(
    "value",
    [
        *(2, -3, 3.0, True, "3", None, [3]),
        *(np.float64(3), np.bool_(True), np.asarray([3])),
        *(torch.tensor(3.0), torch.tensor(True), torch.tensor([3])),
    ],
    ids=repr,
)
def test_what_is_no_integer_or_too_small_is_refused(value):
    with pytest.raises(
        ValueError, match=rf"^Invalid period: {re.escape(repr(value))}\. Allowed: an integer of at .* 3"
    ):
        integer("period", value, least=3)


@pytest.mark.parametrize(
    "value", [0.5, Fraction(1, 2), np.float32(0.5), np.asarray(0.5), torch.tensor(0.5), np.longdouble(0.5)], ids=repr
)
def test_number_of_any_kind_becomes_a_float(value):
    checked = real("budget", value, lambda v: v > 0, "a number above 0")
    assert type(checked) is float and checked == 0.5


@pytest.mark.parametrize("value", [1, np.int64(1), torch.tensor(1)], ids=repr)
def test_integer_is_a_number_too(value):
    checked = real("budget", value, lambda v: v > 0, "a number above 0")
    assert type(checked) is float and checked == 1.0


@pytest.mark.parametrize(
    "value",
    [0, math.nan, "1", None, True, 1j, [1.0], np.bool_(True), np.str_("1"), torch.tensor(True), torch.ones(1)],
    ids=repr,
)
def test_what_is_no_number_or_not_allowed_is_refused(value):
    with pytest.raises(ValueError, match=rf"^Invalid budget: {re.escape(repr(value))}\. Allowed: a number above 0\."):
        real("budget", value, lambda v: v > 0, "a number above 0")


def test_choice_comes_back_as_it_is_listed():
    assert choice("safeguard", None, ("loss", None)) is None
    checked = choice("safeguard", np.str_("loss"), ("loss", None))
    assert type(checked) is str and checked == "loss"


@pytest.mark.parametrize(
    "value", ["other", "Loss", 0, False, ["loss"], np.array(["loss", "loss"]), torch.ones(2)], ids=repr
)
def test_what_is_no_choice_is_refused(value):
    with pytest.raises(ValueError, match=rf"^Invalid safeguard: {re.escape(repr(value))}\. Allowed: 'loss' or None\."):
        choice("safeguard", value, ("loss", None))


def test_none_is_refused_where_it_is_no_choice():
    with pytest.raises(ValueError, match="Invalid mixing: None"):
        choice("mixing", None, ("anderson", "paper"))
