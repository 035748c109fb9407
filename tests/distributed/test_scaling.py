"""The cost model of benchmarks.scaling against what the library does: in real processes, and in pretended worlds."""

import csv
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run

from experiments.benchmarks.scaling import costs, simulation
from experiments.benchmarks.scaling.checks import FULL, acceleration_on_paper
from experiments.benchmarks.scaling.costs import LAYOUTS, Setting
from experiments.benchmarks.scaling.estimates import Machine, acceleration, all_gather, all_reduce, gradients
from experiments.benchmarks.scaling.models import MODELS
from experiments.benchmarks.scaling.tables import all_rows

TABLE = Path(__file__).parents[2] / "docs/results/scaling/scaling.csv"
SHAPES = [(300, 70), (7, 3), (11,)]
"""21,032 numbers; 4 divides the rows of one parameter, and 384 has more ranks than there are rows."""
SETTINGS = [
    Setting(history_size=4, period=5, store_period=2),
    Setting(history_size=3, period=2, store_period=1, row_itemsize=2),
]


# ---------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(("length", "ranks"), [(10, 4), (5, 4), (3, 4), (64, 64), (65, 64), (1, 1), (7, 3)])
def test_rows_are_those_of_torch_chunk(length, ranks):
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(ranks)]
    expected = chunks + [0] * (ranks - len(chunks))
    assert [costs.rows_of(length, ranks, rank) for rank in range(ranks)] == expected


def test_a_message_has_the_products_of_new_rows():
    """m = 3, one row since: residual differences, residual and point differences are 7 rows, 3 of them new."""
    setting = Setting(history_size=3, period=5, store_period=5)
    assert costs.summed_bytes(setting) == 8 * 7 * 3


def test_the_fullest_rank_of_a_small_world_by_hand():
    """Rows 2 x 5 and 1 of [4 x 5] and [3] on 3 ranks; m = 1: two rows and four vectors in float32, a window of two."""
    setting = Setting(history_size=1, average_window=2)
    shapes, layout = [(4, 5), (3,)], LAYOUTS["fsdp2"]
    assert costs.kept_bytes(shapes, layout, 3, setting) == 11 * (2 + 4 + 2) * 4
    assert costs.kept_bytes(shapes, layout, 3, setting, rank=2) == 1 * (2 + 4 + 2) * 4


def test_the_figures_expected_of_resnet50_hold():
    """MB of rows alone at m = 20: on the mean rank, and on the fullest if the first dimension is cut."""
    model, rows = MODELS["resnet50"], 160e-6
    mean = [rows * model.count / ranks for ranks in (384, 1536)]
    fullest = [rows * costs.numbers_kept(model.shapes, ranks) for ranks in (384, 1536)]
    assert [*mean, *fullest] == pytest.approx([10.65, 2.66, 15.3, 9.2], abs=0.05)


def test_estimates_of_a_machine_with_round_numbers():
    machine = Machine("", bandwidth=1e9, latency=1e-3, memory=1e12, training=1e12, single=1e12)
    assert all_reduce(1e9, 4, machine) == pytest.approx(2 * 0.75 + 2 * 2e-3)
    assert all_gather(1e9, 4, machine) == pytest.approx(3 * 1.001)
    assert gradients(10**9, LAYOUTS["fsdp2"], 4, machine) == pytest.approx(3 * 3 * 1.001)
    took = acceleration(SHAPES, LAYOUTS["fsdp2"], 4, FULL, machine)
    assert took.gather == 0 and took.total == took.work + took.sum > 0


# --------------------------------------------------------------------------------------------------- real processes


def found_by_real_ranks() -> list[dict[str, Any]]:
    """What one acceleration costs on this rank, in every layout and setting."""
    found = []
    for layout, setting in product(LAYOUTS, SETTINGS):
        torch.manual_seed(0)
        optimizer = simulation.build(SHAPES, layout, setting, device="cpu")
        kept = simulation.kept_bytes(optimizer)
        counted = simulation.counted_acceleration(optimizer).as_dict()
        found.append({**counted, "kept": kept, "rank": dist.get_rank()})
    return found


def test_the_model_is_what_four_processes_keep_send_and_multiply():
    for rank, found in enumerate(run(4, found_by_real_ranks)):
        for (layout, setting), counted in zip(product(LAYOUTS, SETTINGS), found, strict=True):
            paper = acceleration_on_paper(SHAPES, layout, 4, setting, rank)
            kept = costs.kept_bytes(SHAPES, LAYOUTS[layout], 4, setting, rank)
            assert counted == {**paper, "kept": kept, "rank": rank}, (layout, setting)


# ------------------------------------------------------------------------------------------------- pretended worlds


@pytest.mark.parametrize(("ranks", "rank"), [(6, 5), (384, 0), (384, 383), (1536, 0), (1536, 1000), (1536, 1535)])
def test_the_model_is_what_is_kept_in_a_pretended_world(ranks, rank):
    with simulation.world(ranks, rank):
        for layout, setting in product(LAYOUTS, SETTINGS):
            kept = simulation.kept_bytes(simulation.build(SHAPES, layout, setting))
            assert kept == costs.kept_bytes(SHAPES, LAYOUTS[layout], ranks, setting, rank), layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_what_is_sent_and_multiplied_in_a_pretended_world(layout):
    with simulation.world(1536):
        torch.manual_seed(0)
        counted = simulation.counted_acceleration(simulation.build(SHAPES, layout, SETTINGS[0], device="cpu"))
    assert counted.as_dict() == acceleration_on_paper(SHAPES, layout, 1536, SETTINGS[0])


@pytest.mark.parametrize("rank", [0, 383])
@pytest.mark.parametrize("layout", ["ddp", "ddp-sharded", "ddp-sharded-by-all"])
def test_resnet50_on_384_ranks_keeps_what_the_page_says(layout, rank):
    shapes = MODELS["resnet50"].shapes
    with simulation.world(384, rank):
        kept = simulation.kept_bytes(simulation.build(shapes, layout, FULL))
    assert kept == costs.kept_bytes(shapes, LAYOUTS[layout], 384, FULL, rank)


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_published_table_is_that_of_the_model_and_of_the_library():
    with TABLE.open(encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    simulated = 0
    for row, today in zip(published, all_rows(), strict=True):
        first, last = row.pop("simulated_rank_first"), row.pop("simulated_rank_last")
        assert row == {name: str(today.get(name, "")) for name in row}
        if first:
            assert (first, last) == (row["kept"], row["kept_on_last"])
            simulated += 1
    assert simulated > 100
