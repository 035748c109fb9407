"""Distributed checkpoints go from any layout to any other: the same bits of history, training as if never stopped."""

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import CASES, build
from checkpoints import FLATTENED, NESTED, entries, load, save, state
from layouts import ALL, Training, assert_bitwise_equal, distance
from processes import run
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

STOPS = {
    "p = 5, q = 2, momentum": (23, 46, 69, 93, 115),  # rows that are stored and not multiplied yet
    "residual, averaged": (18, 36, 54, 69, 85),  # right after a jump, which may be taken back
    "ratios that change": (13, 25, 40, 52, 66),  # where the history restarts
    "p = 10, q = 1, momentum": (45, 87, 130, 171, 210),
    "short jumps": (14, 28, 41, 53, 66),  # by the length of the path through what was stored before
    "gradients": (3, 8, 13, 18, 24),  # before and after the first jump
    "gradients, two rates": (2, 7, 12, 17, 30),
}
CHAINS = {
    "over all": ("fsdp", "fsdp on 2", "ddp", "single", "fsdp x tp"),
    "two by two": ("fsdp on 2", "ddp", "single", "ddp on 2, history sharded", "tensor parallel"),
    "history sharded": (
        *("ddp on 2, history sharded", "fsdp on 2", "ddp, history sharded", "single", "ddp on 2, history sharded"),
    ),
    "tensor parallel": ("tensor parallel", "hsdp", "ddp", "tensor parallel", "ddp on 2, history sharded"),
    "short": ("fsdp on 2", "single", "ddp", "ddp on 2, history sharded", "fsdp on 2"),
}
CORE = ("p = 5, q = 2, momentum", "residual, averaged", "gradients")


def leg(
    layout: str, names: tuple[str, ...], number: int, folder: Path, form: StateDictOptions = NESTED
) -> dict[str, dict[str, Any]]:
    """Load what the leg before has left, train on, and save."""
    found: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        training, stops = build(name, layout), (0, *STOPS[name])
        report: dict[str, Any] = {}
        if number:
            load(training, folder / f"{i}-{number}", form)
            report["loaded"] = entries(training)
        training.advance(stops[number + 1], start=stops[number])
        save(training, folder / f"{i}-{number + 1}", form)
        found[name] = {**report, "saved": entries(training), **training.outcome()}
    return found


def run_leg(layout: str, *args: Any) -> list[dict[str, dict[str, Any]]]:
    if layout == "single":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no other ranks
            return [leg(layout, *args)]
    return run(ALL[layout].ranks, leg, layout, *args)


@cache
def undisturbed(name: str) -> Training:
    return build(name).advance()


def assert_as_undisturbed(
    chain: tuple[str, ...], names: tuple[str, ...], folder: Path, form: StateDictOptions = NESTED
) -> None:
    before: dict[str, Any] = {}
    pending = 0
    for number, layout in enumerate(chain):
        first, *others = run_leg(layout, names, number, folder, form)
        for name in names:
            where = f"{name}, leg {number} in {layout}"
            assert all(other[name]["counts"] == first[name]["counts"] for other in others), where
            if number:
                assert_same_history(first[name]["loaded"], before[name]["saved"], where)
            counts = first[name]["counts"]
            decided = sum(count for key, count in counts.items() if key.startswith(("accepted", "rejected")))
            pending += counts.get("attempted", 0) - decided
        before = first
    for name in names:
        assert before[name]["counts"] == undisturbed(name).counts(), name
        assert distance(before[name]["weights"], undisturbed(name).weights()) <= 1e-12, name
    assert pending > 0  # at least one jump was still to be judged when it was saved


def assert_same_history(ours: dict[str, Tensor], theirs: dict[str, Tensor], where: str) -> None:
    rows = {name for name in theirs if name.endswith(("point_diffs", "residual_diffs", "last_point", "last_residual"))}
    assert len(rows) == 4 * 7, where  # of 7 parameters
    assert any(theirs[name].count_nonzero() for name in rows)
    try:
        assert_bitwise_equal(ours, theirs)
    except AssertionError as problem:
        problem.add_note(where)
        raise


def test_checkpoints_go_from_layout_to_layout(tmp_path):
    assert_as_undisturbed(CHAINS["short"], CORE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["over all", "history sharded", "tensor parallel"])
def test_checkpoints_go_through_all_layouts(chain, tmp_path):
    assert_as_undisturbed(CHAINS[chain], CORE, tmp_path)


@pytest.mark.slow
def test_flattened_checkpoints_go_from_layout_to_layout(tmp_path):
    assert_as_undisturbed(CHAINS["over all"], CORE[1:], tmp_path, FLATTENED)


@pytest.mark.slow
def test_checkpoints_hold_what_any_option_needs(tmp_path):
    assert_as_undisturbed(CHAINS["two by two"], tuple(STOPS)[1:], tmp_path)


# ----------------------------------------------------------------------------------------------- other ways to save

NAME, STOP = "p = 5, q = 2, momentum", 23


def saved_while_training_goes_on(layout: str, folder: Path) -> dict[str, Any]:
    training = build(NAME, layout).advance(STOP)
    saved = entries(training)
    apart = dist.new_group(backend="gloo")  # in the group of training, the writer's messages would mix with ours
    writing = dcp.async_save(state(training), checkpoint_id=folder, process_group=apart)
    training.advance(start=STOP)
    writing.result()
    again = build(NAME, layout)
    load(again, folder)
    loaded = entries(again)
    again.advance(start=STOP)
    return {"saved": saved, "loaded": loaded, "first": training.outcome(), "second": again.outcome()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp on 2", "ddp on 2, history sharded"])
def test_training_goes_on_while_a_checkpoint_is_written(layout, tmp_path):
    for rank in run(2, saved_while_training_goes_on, layout, tmp_path / "checkpoint"):
        assert_bitwise_equal(rank["loaded"], rank["saved"])
        assert_bitwise_equal(rank["second"]["weights"], rank["first"]["weights"])
        assert distance(rank["second"]["weights"], undisturbed(NAME).weights()) <= 1e-12


FORMS = {
    "full": (StateDictOptions(full_state_dict=True), StateDictOptions(full_state_dict=True)),
    "full, from rank 0": (
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
    "flattened": (
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ),
}


def through_a_state_dict(layout: str, form: str) -> dict[str, Any]:
    getting, setting = FORMS[form]
    training = build(NAME, layout).advance(STOP)
    saved = entries(training)
    model = get_model_state_dict(training.model, options=getting)
    optimizer = get_optimizer_state_dict(training.model, training.optimizer, options=getting)
    again = build(NAME, layout)
    set_model_state_dict(again.model, dict(model), options=setting)  # which renames the keys in it
    set_optimizer_state_dict(again.model, again.optimizer, copy.deepcopy(optimizer), options=setting)
    loaded = entries(again)
    again.advance(start=STOP)
    whole = optimizer if form != "flattened" and dist.get_rank() == 0 else None
    return {"saved": saved, "loaded": loaded, **again.outcome(), "model": model if whole else None, "optimizer": whole}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp on 2", "ddp", "ddp on 2, history sharded"])
def test_full_and_flattened_state_dicts_hold_the_history(layout):
    ranks = run(2, lambda: [through_a_state_dict(layout, form) for form in FORMS])
    for rank in ranks:
        for form, found in zip(FORMS, rank, strict=True):
            assert_same_history(found["loaded"], found["saved"], form)
            assert distance(found["weights"], undisturbed(NAME).weights()) <= 1e-12, form
    for found in ranks[0][:2]:
        assert_goes_on_alone(found["model"], found["optimizer"])


def assert_goes_on_alone(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """A full state dict is one of plain tensors, that a single process goes on from."""
    training = build(NAME)
    assert all(type(value) is Tensor for value in model.values())
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(training.model, model, options=options)
    set_optimizer_state_dict(training.model, training.optimizer, optimizer, options=options)
    training.advance(start=STOP)
    assert distance(training.weights(), undisturbed(NAME).weights()) <= 1e-12


def of_another_size(folder: Path) -> str:
    build(NAME, "fsdp on 2").advance(STOP)
    training = build(NAME, "fsdp on 2", history_size=3)
    try:
        load(training, folder)
    except BaseException as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


@pytest.mark.slow
def test_a_checkpoint_of_another_history_size_is_refused_on_all_ranks(tmp_path):
    def write() -> None:
        save(build(NAME, "fsdp on 2").advance(STOP), tmp_path / "checkpoint")

    run(2, write)
    messages = run(2, of_another_size, tmp_path / "checkpoint")
    assert all(messages), messages


def test_stops_are_where_something_is_under_way():
    steps = {name: CASES[name].steps for name in STOPS}
    assert {name: stops[-1] for name, stops in STOPS.items()} == steps
    assert all(torch.tensor(stops).diff().min() > (4 if "gradients" in name else 10) for name, stops in STOPS.items())
