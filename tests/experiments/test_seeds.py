"""Like with like: hand-made results with unequal seeds, where a mean over a method's own seeds would mislead."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from fake_results import decay, write_run

from experiments.comparison import Comparison, collect
from experiments.curves import PANELS, draw_metric
from experiments.figures import STYLES
from experiments.methods import METHODS
from experiments.pictures import pictures
from experiments.report import figure_data
from experiments.results import load_runs
from experiments.seeds import alike, common_seeds, in_words, seed_sets
from experiments.tables import paired_table
from experiments.text import compared

IMAGE = {"x": np.arange(3.0), "t": np.arange(2.0), "exact": np.ones((3, 2)), "predicted": np.zeros((3, 2))}


def results(folder: Path, finals: dict[str, dict[int, float]], task: str = "foreign", **kept) -> Comparison:
    """Runs that end at these values: variant -> seed -> final."""
    for variant, seeds in finals.items():
        for seed, final in seeds.items():
            write_run(folder, task, variant, seed, metrics=decay(final=final), **kept)
    tasks, problems = collect(load_runs(folder)[0])
    assert not problems
    return tasks[0]


# Seed 2 is easy, and EMA, which is no better than the base, has only that one.
UNEQUAL = {"base": {0: 0.4, 1: 0.2, 2: 0.01}, "anderson": {0: 0.4, 1: 0.2, 2: 0.01}, "ema": {2: 0.01}}


def test_means_side_by_side_are_over_the_same_seeds(tmp_path):
    paper, peers = draw_metric(results(tmp_path, UNEQUAL), "mse", "step").axes
    assert paper.get_title() == "the paper's methods, 3 seeds" and peers.get_title() == "peers, 1 seed"
    ends = [[line.get_ydata()[-1] for line in panel.get_lines()] for panel in (paper, peers)]
    np.testing.assert_allclose(ends[0], [(0.4 + 0.2 + 0.01) / 3] * 2)
    np.testing.assert_allclose(ends[1], [0.01] * 2)


def test_methods_without_common_seeds_keep_their_own(tmp_path):
    groups = alike(results(tmp_path, {"base": {0: 0.1, 1: 0.1}, "ema": {7: 0.1}}).groups)
    assert [group.seeds for group in groups] == [[0, 1], [7]]
    assert in_words(groups) == "each on its own seeds"


def test_no_peer_is_left_out_of_the_figure(tmp_path):
    peers = [method for method in METHODS.values() if method.kind == "peer"]
    task = results(tmp_path, {name: {0: 0.1} for name in ("base", *(peer.name for peer in peers))})
    drawn = [line.get_label() for axes in draw_metric(task, "mse", "step").axes for line in axes.get_lines()]
    assert {f"{peer.label}\n(one seed)" for peer in peers} <= set(drawn)


def test_page_has_the_means_over_each_set_of_seeds_that_readers_can_come_to(tmp_path):
    finals = {"base": {0: 0.4, 1: 0.2, 2: 0.01, 3: 0.1}, "ema": {1: 0.2, 2: 0.01}, "swa": {2: 0.03, 3: 0.1}}
    task = results(tmp_path, finals)
    assert seed_sets(task) == [(0, 1, 2, 3), (1, 2), (2, 3), (2,)]  # the last: of the peers and the base
    data = figure_data(task)
    assert data["seedCounts"] == [4, 2, 2, 1]
    curves = data["metrics"]["mse"]["curves"]
    ends = {variant: {place: c["mean"]["mean"][-1] for place, c in found.items()} for variant, found in curves.items()}
    assert ends["base"] == pytest.approx({0: 0.1775, 1: 0.105, 2: 0.055, 3: 0.01})
    assert ends["ema"] == pytest.approx({1: 0.105, 3: 0.01})
    assert ends["swa"] == pytest.approx({2: 0.065, 3: 0.03})
    assert [group["ownSeeds"] for group in data["groups"]] == [0, 1, 2]


def test_picture_of_the_best_is_not_of_the_one_with_easy_seeds(tmp_path):
    """EMA's mean is the lowest, on the easy seeds; Lookahead was lucky once; SWA halves the error on every seed."""
    base = {0: 0.4, 1: 0.2, 2: 0.1, 3: 0.01, 4: 0.012}
    halved = {0: 0.2, 1: 0.1, 2: 0.05, 3: 0.0049, 4: 0.0062}
    task = results(
        tmp_path,
        {"base": base, "ema": {3: 0.011, 4: 0.0125}, "swa": halved, "lookahead": {0: 0.001}},
        pictures=IMAGE,
    )
    shown = pictures(task)
    assert [picture.label for picture in shown] == ["base", METHODS["swa"].label]
    # Ratios 0.5, 0.5, 0.5, 0.49, 0.52: the middle one is on the first three.
    assert {picture.seed for picture in shown} <= {0, 1, 2}
    assert compared(shown[1].against).startswith("ratio 0.501 [") and compared(shown[1].against).endswith(", 5 seeds")


def test_picture_is_of_a_seed_that_is_neither_the_best_nor_the_worst(tmp_path):
    finals = {"base": {0: 0.1, 1: 0.1, 2: 0.1}, "ema": {0: 0.001, 1: 0.3, 2: 0.05}}
    assert [picture.seed for picture in pictures(results(tmp_path, finals, pictures=IMAGE))] == [2, 2]


def test_runs_from_before_a_setting_was_there_are_compared_with_those_since(tmp_path):
    finals = {"base": {0: 0.1, 1: 0.1}}
    results(tmp_path, finals, task="diabetes")
    known = collect(load_runs(tmp_path)[0])[0][0].groups[0].traces[0].run.config["settings"]
    older = {name: value for name, value in known.items() if name != "forward_cost"}
    assert older != known
    task = results(tmp_path, {"base": {2: 0.1}, "soap": {0: 0.05, 2: 0.05}}, task="diabetes", settings=older)
    assert common_seeds(task.groups) == (0, 2)
    assert paired_table(task)["pairs"].tolist() == [2, 2]


# Colours, by Machado, Oliveira and Fernandes (2009): what remains of linear RGB without one kind of cones.
VISIONS = {
    "full": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, vision: str) -> np.ndarray:
    """Where a colour is in CIELAB for such an eye: distances there are those that are seen."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    seen = np.clip(VISIONS[vision] @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    x, y, z = np.cbrt(TO_XYZ @ seen / TO_XYZ.sum(axis=1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("kind", [kind for kind in PANELS if kind != "variant"])
def test_methods_in_one_panel_are_told_apart_by_any_eye(kind, vision):
    drawn = ["base", *(method.name for method in METHODS.values() if method.kind == kind)]
    for one, other in combinations(dict.fromkeys(drawn), 2):
        first, second = STYLES[one], STYLES[other]
        distance = np.linalg.norm(lab(first.colour, vision) - lab(second.colour, vision))
        assert first.dash != second.dash or distance > 15, (one, other, distance)
