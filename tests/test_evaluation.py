"""The loss safeguard: what it decides, and that looking leaves no trace."""

import copy
from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from training import BASES, EAGER, assert_counters_add_up, assert_same, loss_of, make, make_model, train, weights

from torch_anderson import Anderson
from torch_anderson._anderson.step import NO_LOSS

GUARDED = {**EAGER, "safeguard": "loss"}
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def restless_model():
    """Batch statistics in buffers, and random masks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))


def restless_loss(model):
    return (model(INPUTS) - INPUTS.sum(1, keepdim=True)).square().mean()


def run_restless(optimizer_of, steps=40, **step_options):
    """Losses, random numbers drawn in between, and all that the model holds."""
    model = restless_model()
    optimizer = optimizer_of(model.parameters())
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = restless_loss(model)
        loss.backward()
        if step_options:
            gradients = [p.grad for p in model.parameters()]
            values = [p.grad.clone() for p in model.parameters()]
            optimizer.step(loss_fn=lambda: restless_loss(model) + step_options["above"])
            assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
            assert_same(gradients, values)
        else:
            optimizer.step()
        seen += [loss.detach(), torch.rand(2)]
    return [*seen, *(value.clone() for value in model.state_dict().values())], optimizer


def test_looking_leaves_random_state_buffers_and_gradients_untouched():
    """Every candidate is rejected (its loss is not a number), so that the run must be the base's bit for bit."""
    seen, optimizer = run_restless(lambda params: Anderson(Adam(params, lr=1e-2), **GUARDED), above=float("nan"))
    expected, _ = run_restless(lambda params: Adam(params, lr=1e-2))
    assert optimizer.stats.as_dict()["rejected_loss"] > 0
    assert_same(seen, expected)


def test_an_evaluation_leaves_modules_of_other_threads_alone():
    """A loss function in which another thread counts batches in its own BatchNorm."""
    other, optimizer_of = nn.BatchNorm1d(4), lambda params: Anderson(SGD(params, lr=1e-2), **GUARDED)
    model = restless_model()
    optimizer, calls = optimizer_of(model.parameters()), []

    def loss_fn():
        thread = Thread(target=other, args=(INPUTS,))
        thread.start()
        thread.join()
        calls.append(1)
        return restless_loss(model)

    for _ in range(20):
        optimizer.zero_grad()
        restless_loss(model).backward()
        optimizer.step(loss_fn=loss_fn)
    assert int(other.num_batches_tracked) == len(calls) > 0
    assert int(model[1].num_batches_tracked) == 20


def test_gradients_and_buffers_of_a_model_in_another_thread_are_its_own():
    """Training in one thread beside evaluations in another: as many batches as were made, and no error."""
    stop = Event()
    model, optimizer = make("sgd", safeguard="loss", period=1)

    def evaluate_all_the_time():
        i = 0
        while not stop.is_set():
            train(model, optimizer, i + 1, start=i, loss_fn=lambda: loss_of(model, 0))
            i += 1

    thread = Thread(target=evaluate_all_the_time)
    thread.start()
    try:
        torch.manual_seed(0)
        beside = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        base = SGD(beside.parameters(), lr=1e-2)
        for _ in range(500):
            base.zero_grad()
            restless_loss(beside).backward()
            base.step()
    finally:
        stop.set()
        thread.join()
    assert int(beside[1].num_batches_tracked) == 500
    assert optimizer.stats.counts["extra_evaluations"] > 0


def test_both_losses_are_taken_with_the_same_random_numbers():
    model, optimizer = make("sgd", safeguard="loss")
    drawn = []

    def loss_fn():
        drawn.append(torch.rand(3))
        return 1.0

    train(model, optimizer, 12, loss_fn=loss_fn)
    assert len(drawn) == optimizer.stats.as_dict()["extra_evaluations"] > 0
    assert_same(drawn[::2], drawn[1::2])


def test_a_loss_function_that_goes_backward_leaves_no_gradients():
    model, other = make_model(), make_model(1)
    groups = [{"params": list(model.parameters())}, {"params": list(other.parameters()), "anderson": False}]
    optimizer = Anderson(SGD(groups, lr=0.1), **GUARDED)
    evaluated = []

    def loss_fn():
        loss = loss_of(model, 0) + loss_of(other, 0)
        loss.backward()
        evaluated.append(loss)
        return loss

    for i in range(12):
        optimizer.zero_grad()
        (loss_of(model, i) + loss_of(other, i)).backward()
        before = [p.grad.clone() for group in groups for p in group["params"]]
        optimizer.step(loss_fn=loss_fn)
        assert_same([p.grad for group in groups for p in group["params"]], before)
    assert evaluated


@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw_foreach", "adamw_fused", "adagrad", "list_state"])
@pytest.mark.parametrize("options", [{}, {"period": 4, "store_period": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rejected_jumps_leave_the_base_alone_bit_for_bit(base, options, dtype):
    model, optimizer = make(base, dtype=dtype, safeguard="loss", **options)
    plain = make_model(dtype=dtype)
    train(model, optimizer, 20, loss_fn=lambda: 1.0)
    train(plain, BASES[base](plain.parameters()), 20)
    assert_same(weights(model), weights(plain))
    assert optimizer.stats.as_dict()["rejected_loss"] > 0
    assert optimizer.stats.as_dict()["accepted"] == 0


def test_no_accepted_jump_raises_the_loss_of_its_batch():
    model, optimizer = make("adamw_foreach", safeguard="loss")
    plain = make_model()
    reference = BASES["adamw_foreach"](plain.parameters())
    for i in range(60):
        plain.load_state_dict(model.state_dict())
        if i:
            reference.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
        accepted = optimizer.stats.as_dict()["accepted"]
        train(model, optimizer, i + 1, start=i, loss_fn=lambda i=i: loss_of(model, i))
        train(plain, reference, i + 1, start=i)
        if optimizer.stats.as_dict()["accepted"] > accepted:
            assert loss_of(model, i) < loss_of(plain, i)
        else:
            assert_same(weights(model), weights(plain))
    assert optimizer.stats.as_dict()["accepted"] > 0
    assert_counters_add_up(optimizer)


def test_a_loss_that_differentiates_its_model_can_be_evaluated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = Anderson(Adam(model.parameters(), lr=1e-2), **GUARDED)
    x = torch.linspace(0, 1, 16).unsqueeze(1).requires_grad_()

    def residual_of_the_equation():
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope - u).square().mean() + (u[0] - 1).square().mean()

    for _ in range(30):
        optimizer.zero_grad()
        residual_of_the_equation().backward()
        optimizer.step(loss_fn=residual_of_the_equation)
    assert optimizer.stats.as_dict()["extra_evaluations"] > 0
    assert x.grad is None or x.grad.isfinite().all()


# ------------------------------------------------------------------- how the function gets to the step


def test_without_a_loss_function_the_step_is_plain_and_counted_and_said_once(caplog):
    model, optimizer = make("sgd", safeguard="loss")
    plain = make_model()
    train(model, optimizer, 12)
    train(plain, BASES["sgd"](plain.parameters()), 12)
    assert_same(weights(model), weights(plain))
    assert optimizer.stats.as_dict()["skipped_no_loss"] > 1
    assert [record.message for record in caplog.records] == [NO_LOSS]


def test_a_function_given_ahead_is_one_given_with_the_step():
    (model, optimizer), (twin, direct) = make("sgd", safeguard="loss"), make("sgd", safeguard="loss")
    for i in range(20):
        optimizer.set_batch(loss_fn=lambda i=i: loss_of(model, i))
        train(model, optimizer, i + 1, start=i)
        train(twin, direct, i + 1, start=i, loss_fn=lambda i=i: loss_of(twin, i))
    assert_same(weights(model), weights(twin))
    assert optimizer.stats.counts == direct.stats.counts
    assert optimizer.stats.as_dict()["extra_evaluations"] > 0


@pytest.mark.parametrize("given_with_the_step", [True, False])
def test_a_function_given_ahead_serves_one_step_only(given_with_the_step):
    model, optimizer = make("sgd", safeguard="loss")
    train(model, optimizer, 4)
    optimizer.set_batch(loss_fn=lambda: pytest.fail("of a batch long gone"))
    with_step = {"loss_fn": lambda: 1.0} if given_with_the_step else {}
    train(model, optimizer, 5, start=4, **with_step)
    train(model, optimizer, 6, start=5)  # an accelerating one
    assert optimizer.stats.as_dict()["skipped_no_loss"] == 2
