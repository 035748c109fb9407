"""fixed_point and its arguments: what a map may do with its input, dtypes, misuse."""

import math
import re

import numpy as np
import pytest
import torch

from torch_anderson import fixed_point

# ------------------------------------------------------------------------------------------ what g does with x


def overwrites_its_input(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(0.5).add_(0.5)


def uses_its_input_as_scratch(x: torch.Tensor) -> torch.Tensor:
    u = 0.5 * x + 0.5
    x.zero_()
    return u


def changes_the_shape_of_its_input(x: torch.Tensor) -> torch.Tensor:
    u = 0.5 * x + 0.5
    x.unsqueeze_(0)
    return u


@pytest.mark.parametrize("g", [overwrites_its_input, uses_its_input_as_scratch, changes_the_shape_of_its_input])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("start", [0.0, 7.0])
def test_map_may_do_as_it_likes_with_its_input(g, dtype, start):
    x0 = torch.full((2,), start, dtype=dtype)
    solution = fixed_point(g, x0)
    assert solution.converged
    np.testing.assert_allclose(solution.x, [1.0, 1.0], atol=2e-6)
    assert x0.tolist() == [start, start]


@pytest.mark.parametrize("buffer_is_start", [False, True])
def test_map_may_return_the_same_buffer_every_time(buffer_is_start):
    start = torch.ones(2, dtype=torch.float64)
    buffer = start if buffer_is_start else torch.empty_like(start)
    solution = fixed_point(lambda x: torch.cos(x, out=buffer), start, tol=1e-12)
    buffer.zero_()
    assert solution.converged and solution.iterations <= 10  # as many as with a new tensor each time
    np.testing.assert_allclose(solution.x, 0.7390851332151607, atol=1e-11)


def test_map_that_returns_its_input_is_solved_by_the_start():
    seen = []

    def identity(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    solution = fixed_point(identity, torch.ones(3, dtype=torch.float64))
    seen[0].zero_()  # what the map holds is not what is returned
    assert solution.converged and solution.x.tolist() == [1.0] * 3


def gradient_step(x: torch.Tensor) -> torch.Tensor:
    """A step on |x - 1|^2 / 2 whose gradient comes from autograd."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((x - 1).square().sum() / 2, x)
    return x - 0.5 * gradient


@pytest.mark.parametrize("requires_grad", [False, True])
def test_map_that_uses_autograd_is_solved_without_a_graph(requires_grad):
    solution = fixed_point(gradient_step, torch.zeros(3, requires_grad=requires_grad))
    assert solution.converged
    np.testing.assert_allclose(solution.x, [1.0] * 3, atol=2e-6)
    assert not any(t.requires_grad for t in vars(solution).values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("enabled", [True, False])
def test_map_runs_in_the_grad_mode_of_the_caller(enabled):
    seen = []

    def g(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return torch.cos(x)

    with torch.set_grad_enabled(enabled):
        fixed_point(g, torch.ones(1))
    assert set(seen) == {enabled}


def test_weights_of_the_map_get_no_graph_and_no_gradient():
    weight = torch.tensor([0.5, 0.25], requires_grad=True)
    solution = fixed_point(lambda x: weight * x + 1, torch.zeros(2))
    np.testing.assert_allclose(solution.x, [2.0, 4 / 3], atol=1e-5)
    assert not solution.x.requires_grad and weight.grad is None


# ------------------------------------------------------------------------------------------------------- dtypes


def test_lazily_conjugated_result_is_read_right():
    # z = conj(0.5 i z + 1) has the solution (4 - 2i) / 3.
    solution = fixed_point(lambda z: (0.5j * z + 1).conj(), torch.zeros(2, dtype=torch.complex128), tol=1e-12)
    assert solution.converged
    np.testing.assert_allclose(solution.x, [(4 - 2j) / 3] * 2, atol=1e-11)


def test_lazily_negated_start_and_result_are_read_right():
    start = torch.tensor([1.0 - 3.0j], dtype=torch.complex128).conj().imag  # 3, stored as -3 and a flag
    solution = fixed_point(lambda x: torch.complex(x, 1 - 0.5 * x).conj().imag, start, tol=1e-12)  # x -> x / 2 - 1
    assert solution.converged
    np.testing.assert_allclose(solution.x, [-2.0], atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "returned"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.complex64, torch.complex128),
        (torch.complex64, torch.float32),
    ],
)
def test_result_of_another_dtype_is_used_and_iterates_keep_theirs(dtype, returned):
    seen = set()

    def g(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.dtype)
        return (0.5 * x.real + 0.5).to(returned)

    solution = fixed_point(g, torch.zeros(2, dtype=dtype))
    assert solution.converged
    assert seen == {solution.x.dtype} == {dtype}
    np.testing.assert_allclose(solution.x, [1.0, 1.0], atol=1e-5)


def test_wider_result_is_compared_at_its_own_precision():
    # In float32, 1 + 1e-9 is 1: the residual at 1 is 1e-9 all the same.
    solution = fixed_point(lambda x: torch.full_like(x, 1 + 1e-9, dtype=torch.float64), torch.ones(1), tol=0.0)
    assert not solution.converged
    assert solution.residual_norm.item() == pytest.approx(1e-9, rel=1e-6)


def test_complex_result_for_a_real_start_is_refused():
    with pytest.raises(TypeError, match=r"torch\.complex64 .* torch\.float32.*complex x0"):
        fixed_point(lambda x: 0.5j * x, torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_start_is_refused_with_advice(dtype):
    with pytest.raises(TypeError, match=rf"x0 has dtype {re.escape(str(dtype))}.*x0\.double\(\)"):
        fixed_point(lambda x: 0.5 * x + 0.5, torch.zeros(2, dtype=dtype))


# ------------------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("shape", "g", "returned"),
    [
        ((3,), lambda x: x[:1] * 0.5 + 1, (1,)),
        ((2, 3), lambda x: x.T, (3, 2)),
        ((2, 3), lambda x: x.flatten(), (6,)),
        ((3,), lambda x: x.sum(), ()),
        ((1, 3), lambda x: x.squeeze(0), (3,)),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_result_of_another_shape_is_refused(shape, g, returned, batched):
    with pytest.raises(ValueError, match=re.escape(f"shape {returned} for an x of shape {shape}")):
        fixed_point(g, torch.ones(shape), batched=batched)


@pytest.mark.parametrize(("returned", "name"), [(None, "NoneType"), (1.0, "float"), ((torch.ones(2),), "tuple")])
def test_result_that_is_not_a_tensor_is_refused(returned, name):
    with pytest.raises(TypeError, match=f"g must return a tensor, not {name}"):
        fixed_point(lambda x: returned, torch.ones(2))


def test_result_on_another_device_is_refused():
    with pytest.raises(ValueError, match="on meta for an x on cpu"):
        fixed_point(lambda x: x.to("meta"), torch.ones(2))


@pytest.mark.parametrize("start", [1.0, [1.0, 2.0], np.ones(2)])
def test_start_that_is_not_a_tensor_is_refused(start):
    with pytest.raises(TypeError, match=f"x0 must be a tensor, not {type(start).__name__}"):
        fixed_point(torch.cos, start)


def test_batch_without_a_first_dimension_is_refused():
    with pytest.raises(ValueError, match="batched=True"):
        fixed_point(torch.cos, torch.tensor(1.0), batched=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((name, value) for name in ("history_size", "max_iterations") for value in (0, -1, 1.0, True, "3", None)),
        *(("relaxation", value) for value in (0, -0.5, 1.5, math.nan, "1", None, True)),
        *(
            (name, value)
            for name in ("regularization", "tol")
            for value in (-1e-9, math.nan, math.inf, "1", None, True)
        ),
        *(("mixing", value) for value in ("other", None, ["paper"], 1)),
    ],
    ids=str,
)
def test_wrong_option_is_named_with_its_value_and_what_is_allowed(option, value):
    with pytest.raises(ValueError, match=rf"^Invalid {option}: {re.escape(repr(value))}\. Allowed: .+"):
        fixed_point(torch.cos, torch.ones(2), **{option: value})
