import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from experiments.data import MissingData
from experiments.imagenet.__main__ import LOSSES, hits, main, make_optimizer, rate_at
from experiments.imagenet.data import (
    NO_LABEL,
    PADDING,
    Images,
    Key,
    Order,
    Share,
    centre_box,
    normalised,
    random_box,
    read,
    torchvision_decoder,
)
from experiments.imagenet.records import BadSettings, Settings

SIZE = 16
SMALL = ["--model", "resnet20", "--image-size", str(SIZE), "--batch-size", "4", "--log-every", "4", "--workers", "0"]
LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
PATIENCE = 180


def picture(label: int, random: np.random.Generator) -> Image.Image:
    """Noise, brighter in the colour of its class."""
    pixels = random.integers(0, 100, (20, 24, 3))
    pixels[..., label] += 100
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three classes of 16 images to train with, some as PNG, and 5 to validate with."""
    root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 5)):
        for label, name in enumerate(["blue", "green", "red"]):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                picture(label, random).save(root / part / name / f"{i}.{'png' if i % 3 else 'jpg'}")
    return root


def torchrun(folder: Path, out: Path, *options: str, restarts: int = 0) -> subprocess.Popen[str]:
    """Training on two processes."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    program = ["-m", "experiments.imagenet", "--data", str(folder), "--out", str(out), *SMALL, *options]
    command = [sys.executable, "-m", *launcher, "--monitor-interval", "0.1", *program]
    return subprocess.Popen(command, env=os.environ | LOOPBACK, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it said, once it has ended well."""
    try:
        said = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def forked(processes: int, *args: str) -> list[int]:
    """Exit codes of the command on several processes, forked because that is fast."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [fork(rank, processes, port, args) for rank in range(processes)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def fork(rank: int, world: int, port: int, args: tuple[str, ...]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(LOOPBACK)
        if world > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port))
        code = main(list(args))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "model.pt", weights_only=True)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# ------------------------------------------------------------------------------------------------- processes

PAPER = ["--method", "anderson+average", "--epochs", "3", "--checkpoint-every", "3"]


@pytest.mark.slow
def test_a_killed_rank_changes_nothing(folder, tmp_path):
    """Under torchrun's own restart, in the middle of an epoch and after accelerations."""
    args = ["--data", str(folder), "--out", str(tmp_path / "undisturbed"), *SMALL, *PAPER]
    assert forked(2, *args) == [0, 0]
    disturbed = torchrun(folder, tmp_path / "disturbed", *PAPER, restarts=1)
    kill_after(disturbed, tmp_path / "disturbed" / "checkpoints", step=9)
    assert "resumed in epoch" in ended(disturbed)
    assert_same(weights(tmp_path / "disturbed"), weights(tmp_path / "undisturbed"))
    ours, theirs = metrics(tmp_path / "disturbed"), metrics(tmp_path / "undisturbed")
    assert [record["epoch"] for record in ours] == [0, 1, 2]
    for name in ("rate", "loss", "validation"):
        assert [record[name] for record in ours] == [record[name] for record in theirs]
    counts = [records[-1]["stats"] for records in (ours, theirs)]
    assert counts[0]["attempted"] == counts[1]["attempted"] > 0
    assert counts[0]["accepted"] == counts[1]["accepted"]


def kill_after(launcher: subprocess.Popen[str], checkpoints: Path, step: int) -> None:
    """End rank 1 without warning once there is a checkpoint of this step or a later one."""
    deadline = time.monotonic() + PATIENCE
    while not any(int(path.name[5:]) >= step for path in checkpoints.glob("step-?????????")):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    rank = next(child for child in psutil.Process(launcher.pid).children() if child.environ().get("RANK") == "1")
    rank.kill()


@pytest.mark.slow
def test_with_three_processes_a_second_start_goes_on_bit_for_bit(folder, tmp_path):
    """Sums of three depend on their order, which DDP chooses after its first pass."""
    args = ["--data", str(folder), *SMALL, "--method", "anderson", "--limit-batches", "3"]
    assert forked(3, *args, "--out", str(tmp_path / "once"), "--epochs", "2") == [0, 0, 0]
    for epochs in ("1", "2"):
        assert forked(3, *args, "--out", str(tmp_path / "twice"), "--epochs", epochs) == [0, 0, 0]
    assert_same(weights(tmp_path / "once"), weights(tmp_path / "twice"))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_and_another_strategy(folder, tmp_path):
    args = ["--data", str(folder), "--out", str(tmp_path), *SMALL]
    assert forked(2, *args, "--epochs", "1") == [0, 0]
    saved = weights(tmp_path)
    (tmp_path / "model.pt").unlink()
    assert forked(3, *args, "--epochs", "1", "--strategy", "fsdp") == [0, 0, 0]  # nothing is left to do but to load
    assert_same(weights(tmp_path), saved)
    assert forked(1, *args, "--epochs", "2") == [0]
    assert [record["epoch"] for record in metrics(tmp_path)] == [0, 1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{6 + 12:09d}"]


@pytest.mark.slow
def test_sharded_and_replicated_parameters_train_alike(folder, tmp_path):
    args = ["--data", str(folder), *SMALL, "--epochs", "4"]
    for strategy in ("ddp", "fsdp"):
        assert forked(2, *args, "--out", str(tmp_path / strategy), "--strategy", strategy) == [0, 0]
    ddp, fsdp = weights(tmp_path / "ddp"), weights(tmp_path / "fsdp")
    for name, tensor in ddp.items():
        torch.testing.assert_close(fsdp[name], tensor, rtol=1e-4, atol=1e-4)
    first, *others = metrics(tmp_path / "ddp")
    last = others[-1]
    assert min(each["loss"] for each in others) < first["loss"] / 2  # batches of 4 are noisy: not every epoch is better
    assert last["validation"]["images"] == 15
    assert min(last["seconds"]["data"], last["seconds"]["communication"], last["seconds"]["base_step"]) > 0
    assert last["seconds"]["acceleration"] == 0


@pytest.mark.slow
def test_anderson_does_the_same_wherever_its_history_is(folder, tmp_path):
    args = ["--data", str(folder), *SMALL, "--epochs", "2", "--method", "anderson", "--safeguard", "none"]
    places = {"ddp": [], "fsdp": ["--strategy", "fsdp"], "sharded history": ["--storage-shard"]}
    for place, options in places.items():
        assert forked(2, *args, "--out", str(tmp_path / place), *options) == [0, 0]
    accepted = {metrics(tmp_path / place)[-1]["stats"]["accepted"] for place in places}
    assert len(accepted) == 1 and min(accepted) > 0
    for place in places:
        for name, tensor in weights(tmp_path / "ddp").items():
            torch.testing.assert_close(weights(tmp_path / place)[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [["--precision", "bfloat16"], ["--precision", "float16"], ["--loss", "bce"]])
def test_one_process_without_torchrun(folder, tmp_path, options):
    assert forked(1, "--data", str(folder), "--out", str(tmp_path), *SMALL, "--epochs", "1", *options) == [0]
    assert metrics(tmp_path)[0]["loss"] < 2


def test_another_setting_does_not_go_on(folder, tmp_path, capfd):
    args = ["--data", str(folder), "--out", str(tmp_path), *SMALL, "--limit-batches", "2", "--epochs", "1"]
    assert forked(1, *args) == [0]
    assert forked(1, *args, "--rate", "0.1") == [2]
    assert "begun with 0.05" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------- images


def test_a_missing_folder_says_which_layout_is_expected(tmp_path, capfd):
    assert forked(1, "--data", str(tmp_path), "--out", str(tmp_path / "out"), *SMALL) == [2]
    error = capfd.readouterr().err
    assert f"{tmp_path}/train/<class>/" in error and "Traceback" not in error


def test_a_corrupt_image_is_replaced_and_counted(folder, tmp_path, caplog):
    shutil.copytree(folder, tmp_path / "data")
    bad = tmp_path / "data" / "train" / "blue" / "1.png"
    bad.write_bytes(bad.read_bytes()[:100])
    (tmp_path / "data" / "val" / "red" / "2.png").write_text("no image")
    out = tmp_path / "out"
    assert forked(1, "--data", str(tmp_path / "data"), "--out", str(out), *SMALL, "--epochs", "1") == [0]
    [record] = metrics(out)
    assert record["corrupt"] == 1
    assert record["validation"]["corrupt"] == 1 and record["validation"]["images"] == 14
    data = Images(tmp_path / "data", "train", SIZE, seed=0, augment=True)
    position = [path for path, _ in data.files].index(bad)
    with caplog.at_level(logging.WARNING):
        item = data[Key(0, position)]
    assert (item.skipped, item.label) == (1, 0)
    assert str(bad) in caplog.text


def test_images_that_are_all_damaged_are_no_images(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "1.jpg").write_text("no image")
    with pytest.raises(MissingData, match="None of the images"):
        Images(tmp_path, "train", SIZE, seed=0, augment=True)[Key(0, 0)]


def test_augmentation_depends_on_seed_epoch_and_image_alone(folder):
    def seen(seed: int, epoch: int, image: int) -> torch.Tensor:
        return Images(folder, "train", SIZE, seed, augment=True)[Key(epoch, image)].image

    assert torch.equal(seen(0, 1, 2), seen(0, 1, 2))
    for other in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not torch.equal(seen(0, 1, 2), seen(*other))


def test_random_parts_are_in_the_image_and_of_the_shape_that_is_wanted():
    random = np.random.default_rng(0)
    areas = []
    for _ in range(300):
        left, upper, right, lower = random_box(100, 80, random)
        assert 0 <= left < right <= 100 and 0 <= upper < lower <= 80
        assert 0.7 < (right - left) / (lower - upper) < 1.4
        areas.append((right - left) * (lower - upper) / 8000)
    assert 0.07 < min(areas) < 0.15 and 0.8 < max(areas) <= 1


def test_a_strip_that_no_part_fits_gives_its_middle():
    assert random_box(1000, 2, np.random.default_rng(0)) == (499, 0, 501, 2)


def test_validation_sees_the_middle():
    assert centre_box(256, 512) == (16, 144, 240, 368)


def test_colours_are_normalised_by_those_of_imagenet():
    white = normalised(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    expected = torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    torch.testing.assert_close(white, expected)


def test_torchvision_decodes_where_it_imports_and_pillow_where_it_cannot(folder, monkeypatch):
    def decode_image(path: str, mode: str) -> torch.Tensor:
        if path.endswith(".png"):
            raise RuntimeError("unknown kind of file")
        return torch.full((3, 20, 24), 7, dtype=torch.uint8)

    io = types.SimpleNamespace(decode_image=decode_image, ImageReadMode=types.SimpleNamespace(RGB="RGB"))
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(io=io))
    monkeypatch.setitem(sys.modules, "torchvision.io", io)
    torchvision_decoder.cache_clear()
    try:
        jpg, png = (read(folder / "train" / "red" / name) for name in ("0.jpg", "1.png"))
    finally:
        torchvision_decoder.cache_clear()
    assert np.array(jpg).max() == 7
    assert np.array_equal(np.array(png), np.array(Image.open(folder / "train" / "red" / "1.png")))


# ----------------------------------------------------------------------------------------------------- order


def keys(order: Order) -> list[int]:
    return [key.image for batch in order for key in batch]


def test_processes_share_an_epoch_and_each_image_comes_once():
    shares = [keys(Order(23, 2, rank, 3, seed=1)) for rank in range(3)]
    assert [len(share) for share in shares] == [6, 6, 6]
    assert len({image for share in shares for image in share}) == 18
    assert shares[0] != keys(Order(23, 2, 0, 3, seed=1, epoch=1))


def test_an_epoch_goes_on_in_its_middle_on_any_number_of_processes():
    whole = [keys(Order(24, 2, rank, 3, seed=1)) for rank in range(3)]
    rest = [keys(Order(24, 2, rank, 3, seed=1, first=12)) for rank in range(3)]
    assert rest == [share[4:] for share in whole]
    single = keys(Order(24, 2, 0, 1, seed=1, first=12))
    assert sorted(single) == sorted(image for share in rest for image in share)


def test_validation_takes_each_image_once_and_as_many_batches_everywhere():
    shares = [[[key.image for key in batch] for batch in Share(5, 2, rank, 2)] for rank in range(2)]
    assert shares == [[[0, 1], [4, PADDING]], [[2, 3], [PADDING, PADDING]]]


def test_padding_counts_for_nothing(folder):
    item = Images(folder, "val", SIZE, seed=0, augment=False)[Key(0, PADDING)]
    assert (item.label, item.skipped) == (NO_LABEL, 0)


def test_too_few_images_for_a_step_are_refused():
    with pytest.raises(BadSettings, match="needs 64 images, and there are 50"):
        Order(50, 32, 0, 2, seed=0)


# --------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("processes", "peak"), [(1, 0.05), (384, 0.98), (1536, 1.96)])
def test_learning_rates_are_those_of_the_paper(processes, peak):
    settings = Settings(data=Path())
    rates = [rate_at(settings, epoch, 64 * processes) for epoch in (0, 4, 5, 29, 30, 59, 60, 79, 80, 89)]
    tenths = [peak, peak, peak / 10, peak / 10, peak / 100, peak / 100, peak / 1000, peak / 1000]
    assert rates == pytest.approx([0.05, 0.05, *tenths], rel=5e-4)  # the paper gives three digits


def test_hits_by_hand():
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6], [6, 1, 2, 3, 4, 5]])
    assert hits(scores, torch.tensor([0, 5, 1]), 1) == 2  # the last is the worst choice
    assert hits(scores, torch.tensor([4, 0, 2]), 5) == 2  # fifth, sixth and fifth choice
    assert hits(scores[:, :3], torch.tensor([0, 1, 2]), 5) == 3  # five of three classes are all


def test_binary_cross_entropy_by_hand():
    scores, labels = torch.tensor([[2.0, -1.0]]), torch.tensor([0])
    expected = (np.log1p(np.exp(-2)) + np.log1p(np.exp(-1))) / 2
    assert LOSSES["bce"](scores, labels).item() == pytest.approx(expected)


def test_methods_have_the_options_of_the_paper():
    def options(method: str) -> Any:
        return make_optimizer(Settings(data=Path(), method=method), [torch.zeros(2, requires_grad=True)]).options

    both, alone, average = (options(method) for method in ("anderson+average", "anderson", "average"))
    assert (both.period, both.store_period, both.history_size, both.relaxation) == (5, 5, 20, 0.5)
    assert (both.average.window, alone.average, average.average.window) == (4, None, 4)
    assert both.residual == alone.residual == average.residual == "step"
    assert both.safeguard == alone.safeguard == "residual"
    base = make_optimizer(Settings(data=Path()), [torch.zeros(2, requires_grad=True)])
    assert (type(base), base.defaults["nesterov"], base.defaults["momentum"]) == (torch.optim.SGD, True, 0.9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0}, {"workers": -1}, {"limit_batches": 0}, {"rate": math.nan}, {"rate": -1.0},
        {"weight_decay": math.inf}, {"weight_decay": -1.0}, {"momentum": math.nan}, {"momentum": 1.0},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(BadSettings, match=f"Invalid {next(iter(wrong))}"):
        Settings(data=Path(), **wrong)


@pytest.mark.parametrize("wrong", [{"relaxation": 2.0, "method": "anderson"}, {"momentum": -1.0}])
def test_options_that_the_optimizer_does_not_like_are_refused(wrong):
    with pytest.raises(BadSettings):
        make_optimizer(Settings(data=Path(), **wrong), [torch.zeros(2, requires_grad=True)])
