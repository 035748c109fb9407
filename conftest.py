"""Data for tests: a test finds data sets only if its ``data`` marker names them.

A test that needs data without saying so therefore fails on every machine, and one that says so is skipped where they
are missing. The data come from the folder in ``TORCH_ANDERSON_DATA``, or else from where this machine has them. Tests
download nothing.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

DATA_VARIABLE = "TORCH_ANDERSON_DATA"
BESIDE = Path(__file__).parents[1] / "shared" / "data"
"""Where the admissions table is on machines that develop this project."""


@pytest.fixture(scope="session", autouse=True)
def all_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all data files of this machine; while it exists, the loaders see an empty one."""
    given = os.environ.get(DATA_VARIABLE)
    folder = Path(given) if given else gathered(tmp_path_factory.mktemp("data"))
    with pytest.MonkeyPatch.context() as patch:
        # Here and not in a fixture of each test: fixtures of modules are made before those.
        patch.setenv(DATA_VARIABLE, str(tmp_path_factory.mktemp("no-data")))
        yield folder


def gathered(folder: Path) -> Path:
    """The folder, with links to the data files in the usual places."""
    from experiments import data

    for name in (name for files in data.FILES.values() for name in files):
        found = [place / name for place in (*data.folders(), BESIDE) if (place / name).exists()]
        if found:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(found[0])
    return folder


@pytest.fixture(autouse=True)
def marked_data(request: pytest.FixtureRequest, all_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the data to a test that is marked, or skip it where they are missing."""
    if marker := request.node.get_closest_marker("data"):
        skip_unless_present(all_data, marker.args)
        monkeypatch.setenv(DATA_VARIABLE, str(all_data))


def skip_unless_present(folder: Path, names: tuple[str, ...]) -> None:
    """Skip the test if a file of these data sets is missing."""
    from experiments.data import FILES

    for missing in (file for name in names for file in FILES[name] if not (folder / file).exists()):
        pytest.skip(f"needs {' and '.join(names)}: {missing} is missing")
