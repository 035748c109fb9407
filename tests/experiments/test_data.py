"""Data: from a folder, the cache or a download, never damaged, and a message that helps where they are missing."""

import gzip
import hashlib
import shutil
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from experiments import data

LOADERS = {"admissions": data.load_admissions, "fashion": data.load_fashion, "cifar10": data.load_cifar10}
EACH_DATA_SET = [pytest.param(name, marks=pytest.mark.data(name)) for name in LOADERS]


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No data folder, an empty cache, no package, and an address where nobody answers."""
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(data, "ADMISSIONS_URL", "http://127.0.0.1:9/" + data.ADMISSIONS)
    return tmp_path


# What tests see


@pytest.mark.parametrize("name", LOADERS)
def test_a_test_without_the_marker_finds_no_data(name):
    with pytest.raises(data.MissingData):
        LOADERS[name]()


@pytest.fixture(scope="module")
def early():
    """What a fixture finds that is made before those of the test."""
    return [name for files in data.FILES.values() for name in files if data.present(name)]


def test_a_fixture_of_a_module_finds_no_data(early):
    assert early == []


@pytest.mark.parametrize("name", EACH_DATA_SET)
def test_a_test_with_the_marker_finds_its_data_which_are_gone_when_the_folder_is(name, monkeypatch, tmp_path):
    assert LOADERS[name]()
    monkeypatch.setenv(data.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(data.MissingData):
        LOADERS[name]()


# Where data are looked for


def test_offline_the_message_says_how_to_get_the_table(nowhere):
    with pytest.raises(data.MissingData, match=rf"download https?://.*{data.DATA_VARIABLE}"):
        data.load_admissions()


def test_a_folder_that_is_given_is_the_only_place_and_nothing_is_downloaded(nowhere, monkeypatch):
    (nowhere / "cache").mkdir()
    (nowhere / "cache" / data.CIFAR10).touch()
    assert data.present(data.CIFAR10)
    monkeypatch.setattr(data.pooch, "retrieve", lambda *_: pytest.fail("downloads"))
    monkeypatch.setenv(data.DATA_VARIABLE, str(nowhere / "given"))
    assert data.present(data.CIFAR10) is None
    with pytest.raises(data.MissingData, match=data.DATA_VARIABLE):
        data.load_admissions()


@pytest.fixture
def table(nowhere, all_data):
    """A copy of the admissions table in the data folder."""
    (nowhere / "given").mkdir()
    return Path(shutil.copy(all_data / data.ADMISSIONS, nowhere / "given"))


@pytest.mark.data("admissions")
def test_the_table_is_found_in_the_data_folder(table, monkeypatch):
    monkeypatch.setenv(data.DATA_VARIABLE, str(table.parent))
    features, target = data.load_admissions()
    assert features.shape == (500, 7)
    assert target.var() == pytest.approx(0.01988, rel=1e-3)
    assert features[0].tolist() == [337, 118, 4, 4.5, 4.5, 9.65, 1]


@pytest.mark.data("admissions")
def test_another_copy_with_the_same_numbers_will_do_and_changed_numbers_will_not(nowhere, table):
    heading, _, rows = table.read_text().partition("\n")
    same, other, damaged = (nowhere / name for name in ("same.csv", "other.csv", "damaged.csv"))
    same.write_text("a,b,c,d,e,f,g,h,i\r\n" + rows.replace("\n", "\r\n"))
    assert data.read_admissions(same).shape == (500, 9)
    other.write_text(f"{heading}\n{rows.replace('9.65', '9.66', 1)}")
    with pytest.raises(data.MissingData, match="other numbers"):
        data.read_admissions(other)
    damaged.write_text(f"{heading}\n{rows.replace('9.65', '', 1)}")
    with pytest.raises(data.MissingData, match="damaged"):
        data.read_admissions(damaged)


@pytest.mark.data("admissions")
def test_a_download_is_kept_and_one_with_another_hash_is_refused(nowhere, table, monkeypatch):
    handler = partial(SimpleHTTPRequestHandler, directory=str(table.parent))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(data, "ADMISSIONS_URL", f"http://127.0.0.1:{server.server_port}/{data.ADMISSIONS}")
        with monkeypatch.context() as patch, pytest.raises(data.MissingData):
            patch.setattr(data, "ADMISSIONS_SHA256", "0" * 64)
            data.admissions_file()
        monkeypatch.setattr(data, "ADMISSIONS_SHA256", hashlib.sha256(table.read_bytes()).hexdigest())
        assert data.admissions_file().parent == nowhere / "cache"
        server.shutdown()
    assert data.admissions_file().parent == nowhere / "cache", "found again without the server"


# Fashion-MNIST


def test_fashion_says_which_package_to_install():
    with pytest.raises(data.MissingData, match="dataset-fashion-mnist"):
        data.load_fashion()


@pytest.fixture
def made_up_fashion(tmp_path, monkeypatch):
    """Four IDX files with one or two images in the data folder; returns where they are, and the arrays in them."""
    arrays = {}
    for count, (name, shape) in zip((2, 2, 1, 1), data.FASHION_FILES.items(), strict=True):
        arrays[name] = np.random.default_rng(count).integers(0, 256, (count, *shape[1:]), dtype=np.uint8)
        header = bytes([0, 0, 8, len(shape)]) + np.array(arrays[name].shape, ">u4").tobytes()
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(header + arrays[name].tobytes()))
    monkeypatch.setattr(data, "FASHION_FILES", {name: array.shape for name, array in arrays.items()})
    monkeypatch.setenv(data.DATA_VARIABLE, str(tmp_path))
    return tmp_path, arrays


def test_fashion_is_read_from_the_data_folder(made_up_fashion):
    _, arrays = made_up_fashion
    for found, written in zip(data.load_fashion(), arrays.values(), strict=True):
        np.testing.assert_array_equal(found, written)


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-9], lambda content: b"x" + content])
def test_a_damaged_file_of_fashion_is_named(made_up_fashion, damage):
    folder, arrays = made_up_fashion
    path = folder / list(arrays)[2]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(data.MissingData, match=f"{path} is damaged"):
        data.load_fashion()


@pytest.mark.data("fashion")
def test_fashion_has_ten_even_classes():
    images, labels, test_images, test_labels = data.load_fashion()
    assert images.shape == (60_000, 28, 28)
    assert test_images.shape == (10_000, 28, 28)
    assert [int((labels == label).sum()) for label in range(10)] == [6_000] * 10
    assert [int((test_labels == label).sum()) for label in range(10)] == [1_000] * 10
