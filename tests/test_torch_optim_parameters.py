"""PyTorch's own tests of its optimizers, wrapped: parameters of every kind, and gradients that are zero or None."""

import copy

import pytest
import torch
from optim_db import (
    AGREE,
    PLAIN,
    STABLE,
    Run,
    able,
    assert_equal,
    implementations,
    over_inputs,
    random_gradients,
    steps_with_gradients,
)
from torch.nn import Parameter

# ------------------------------------------------------------------------------- parameters of every kind


@over_inputs(variants=STABLE)
def test_implementations_agree(info, variant, given):
    forloop, *others = (
        Run(info, {**given, **implementation}, variant, dtype=torch.float64) for implementation in implementations(info)
    )
    losses = forloop.train()
    for run in others:
        torch.testing.assert_close(run.train(), losses, **AGREE)
        torch.testing.assert_close(run.weights(), forloop.weights(), **AGREE)


@over_inputs(infos=able("not dense"))
def test_parameters_that_are_not_dense_in_memory_are_refused(info, variant, given):
    for param in (torch.randn(3, 4, 2)[..., 0], torch.randn(3, 2)[..., 0]):
        base = info.optim_cls([Parameter(param)], **given)
        with pytest.raises(ValueError, match="not dense in memory"):
            variant.wrap(base)


@over_inputs(infos=able("transposed"), variants=STABLE)
def test_a_transposed_parameter_is_trained_as_its_contiguous_twin(info, variant, given):
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    contiguous, transposed = Parameter(start.clone()), Parameter(start.t().contiguous().t())
    gradients = random_gradients((3, 4), steps=variant.steps, dtype=torch.float64)
    for param in (contiguous, transposed):
        optimizer = variant.wrap(info.optim_cls([param], **copy.deepcopy(given)))
        steps_with_gradients(optimizer, [param], [[torch.empty_like(param).copy_(g)] for (g,) in gradients])
    assert not transposed.is_contiguous()
    torch.testing.assert_close(transposed.detach(), contiguous.detach(), **AGREE)


@over_inputs(variants=STABLE)
def test_gradients_that_are_not_contiguous_count_as_contiguous_ones(info, variant, given):
    if given.get("fused"):
        return  # the fused kernels read gradients in the order of memory
    shapes = [(3, 4), (3, 1)]
    results = []
    for spread in (False, True):
        params = [Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        gradients = random_gradients(*shapes, steps=variant.steps, dtype=torch.float64)
        if spread:
            gradients = [[torch.stack([g, g], -1)[..., 0] for g in grads] for grads in gradients]
        steps_with_gradients(optimizer, params, gradients)
        results.append([p.detach() for p in params])
    torch.testing.assert_close(*results, **AGREE)


@over_inputs(infos=able("complex"))
def test_complex_parameters_are_trained_as_their_real_views(info, variant, given):
    if given.get("fused"):
        return  # the fused kernels have no complex form
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.complex64)
    number, real = Parameter(start.clone()), Parameter(torch.ones(5))
    number_view, real_twin = Parameter(torch.view_as_real(start).clone()), Parameter(torch.ones(5))
    gradients = random_gradients((3, 4, 2), (5,), steps=variant.steps)
    as_complex = [[torch.view_as_complex(a), b] for a, b in gradients]
    for params, grads in (((number, real), as_complex), ((number_view, real_twin), gradients)):
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        steps_with_gradients(optimizer, params, grads)
    torch.testing.assert_close(torch.view_as_real(number.detach()), number_view.detach())
    torch.testing.assert_close(real.detach(), real_twin.detach())


@over_inputs(infos=able("complex"), variants=STABLE)
def test_complex_parameters_are_trained_as_their_real_and_imaginary_parts(info, variant, given):
    if given.get("fused"):
        return  # the fused kernels have no complex form

    def train(params, number):
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))

        def closure():
            optimizer.zero_grad()
            x, y = number()
            loss = ((1 - x) ** 2 + 100 * (y - x**2) ** 2).abs()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)

    start = torch.randn(2, generator=torch.Generator().manual_seed(1), dtype=torch.complex128)
    whole, a, b = Parameter(start.clone()), Parameter(start.real.clone()), Parameter(start.imag.clone())
    train([whole], lambda: whole)
    train([a, b], lambda: torch.complex(a, b))
    torch.testing.assert_close(torch.complex(a, b).detach(), whole.detach(), **AGREE)


@over_inputs(infos=able("several types"))
def test_parameters_of_several_types_are_trained_together(info, variant, given):
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    params = [Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in dtypes]
    optimizer = variant.wrap(info.optim_cls(params, **given))
    for grads in random_gradients(*[(2, 3)] * len(params), steps=variant.steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step(lambda: torch.tensor(1.0))
    assert [param.dtype for param in params] == list(dtypes)
    assert all(param.isfinite().all() and param.count_nonzero() == 6 for param in params)


@over_inputs(infos=able("zero-dimensional"))
def test_a_parameter_without_dimensions_is_trained_as_one_of_length_one(info, variant, given):
    results = []
    for shape in ((), (1,)):
        params = [Parameter(torch.ones(4)), Parameter(torch.ones(shape))]
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        steps_with_gradients(
            optimizer, params, [[a, b.reshape(shape)] for a, b in random_gradients((4,), (1,), steps=variant.steps)]
        )
        results.append([param.detach().reshape(-1) for param in params])
    assert_equal(*results)


@over_inputs(infos=able("empty"))
def test_an_empty_parameter_changes_nothing(info, variant, given):
    results = []
    for shapes in (((4,), ()), ((4,), (), (0,), (0, 3))):
        params = [Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = variant.wrap(info.optim_cls(params, **copy.deepcopy(given)))
        gradients = random_gradients((4,), (), steps=variant.steps)
        steps_with_gradients(optimizer, params, [[*some, *map(torch.zeros, shapes[2:])] for some in gradients])
        results.append([param.detach() for param in params[:2]])
    assert_equal(*results)


# ------------------------------------------------------------------------------- gradients that are zero or None


def steps_without_gradients(info, variant, given, trainable):
    params = [Parameter(torch.ones(2, 3), requires_grad=trainable) for _ in range(2)]
    optimizer = variant.wrap(info.optim_cls(params, **given))
    for _ in range(3):
        assert optimizer.step(lambda: torch.tensor([1.0])) == 1.0
    assert_equal([param.detach() for param in params], [torch.ones(2, 3)] * 2)
    assert optimizer.stats.as_dict()["attempted"] == 0


@over_inputs()
def test_without_gradients_a_step_does_nothing(info, variant, given):
    steps_without_gradients(info, variant, given, trainable=True)


@over_inputs()
def test_with_all_parameters_frozen_a_step_does_nothing(info, variant, given):
    steps_without_gradients(info, variant, given, trainable=False)


@over_inputs()
def test_gradients_of_zero_move_nothing_that_the_base_leaves_alone(info, variant, given):
    moved = []
    for wrap in (PLAIN, variant):
        param = Parameter(torch.ones(5, 1))
        optimizer = wrap.wrap(info.optim_cls([param], **copy.deepcopy(given)))
        steps_with_gradients(optimizer, [param], [[torch.zeros(5, 1)]] * 3)
        moved.append(not torch.equal(param.detach(), torch.ones(5, 1)))
    assert moved[0] or not moved[1]


@over_inputs()
def test_a_parameter_without_gradient_stays_where_it_is_while_others_are_trained(info, variant, given):
    idle = Parameter(torch.ones(2, 2))
    run = Run(info, given, variant, groups=lambda params: [*params, idle])
    before = run.weights()
    run.train()
    assert_equal(idle.detach(), torch.ones(2, 2))
    assert not any(map(torch.equal, before, run.weights()))


@over_inputs(infos=able("frozen"))
def test_a_parameter_frozen_for_a_while_stays_where_it_is(info, variant, given):
    """Trained, then frozen without gradient, as PyTorch's comparison of implementations does it, then trained again."""
    run = Run(info, given, variant, dtype=torch.float64)
    weight, bias = run.params
    run.train()
    bias.requires_grad_(False)
    bias.grad = None
    before, moving = bias.detach().clone(), weight.detach().clone()
    run.train(3)
    assert_equal(bias.detach(), before)
    bias.requires_grad_(True)
    run.train(3)
    assert not torch.equal(bias.detach(), before)
    assert not torch.equal(weight.detach(), moving)
