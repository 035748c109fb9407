"""Data: from a folder, the cache or a download, never damaged, and a message that helps where they are missing."""

import hashlib
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest
from lab.shared import BESIDE, need_data

from torch_anderson.lab import data


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No data folder, an empty cache, and an address where nobody answers."""
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(data, "ADMISSIONS_URL", "http://127.0.0.1:9/" + data.ADMISSIONS)
    data.load_admissions.cache_clear()
    yield tmp_path
    data.load_admissions.cache_clear()


def test_offline_the_message_says_how_to_get_the_table(nowhere):
    with pytest.raises(data.MissingData, match=rf"download https?://.*{data.DATA_VARIABLE}"):
        data.load_admissions()


def test_the_table_is_found_in_the_data_folder(nowhere, monkeypatch):
    need_data("admissions")
    monkeypatch.setenv(data.DATA_VARIABLE, str(BESIDE))
    features, target = data.load_admissions()
    assert features.shape == (500, 7)
    assert target.var() == pytest.approx(0.01988, rel=1e-3)
    assert features[0].tolist() == [337, 118, 4, 4.5, 4.5, 9.65, 1]


def test_another_copy_with_the_same_numbers_will_do_and_changed_numbers_will_not(nowhere, monkeypatch):
    need_data("admissions")
    text = (BESIDE / data.ADMISSIONS).read_text()
    heading, _, rows = text.partition("\n")
    copy = nowhere / data.ADMISSIONS
    copy.write_text("a,b,c,d,e,f,g,h,i\r\n" + rows.replace("\n", "\r\n"))
    assert data.read_admissions(copy).shape == (500, 9)
    copy.write_text(f"{heading}\n{rows.replace('9.65', '9.66', 1)}")
    with pytest.raises(data.MissingData, match="other numbers"):
        data.read_admissions(copy)
    copy.write_text(f"{heading}\n{rows.replace('9.65', '', 1)}")
    with pytest.raises(data.MissingData, match="damaged"):
        data.read_admissions(copy)


def test_a_download_is_kept_and_one_with_another_hash_is_refused(nowhere, monkeypatch):
    need_data("admissions")
    handler = partial(SimpleHTTPRequestHandler, directory=str(BESIDE))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(data, "ADMISSIONS_URL", f"http://127.0.0.1:{server.server_port}/{data.ADMISSIONS}")
        with pytest.raises(data.MissingData):
            data.admissions_file()
        digest = hashlib.sha256((BESIDE / data.ADMISSIONS).read_bytes()).hexdigest()
        monkeypatch.setattr(data, "ADMISSIONS_SHA256", digest)
        assert data.admissions_file().parent == nowhere / "cache"
        server.shutdown()
    assert data.admissions_file().parent == nowhere / "cache", "found again without the server"


def test_fashion_says_which_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "FASHION", tmp_path)
    data.load_fashion.cache_clear()
    with pytest.raises(data.MissingData, match="dataset-fashion-mnist"):
        data.load_fashion()


def test_fashion_has_ten_even_classes():
    need_data("fashion")
    images, labels, test_images, test_labels = data.load_fashion()
    assert images.shape == (60_000, 28, 28)
    assert test_images.shape == (10_000, 28, 28)
    assert [int((labels == label).sum()) for label in range(10)] == [6_000] * 10
    assert [int((test_labels == label).sum()) for label in range(10)] == [1_000] * 10
