"""Build the wheel and try it in an empty environment: it brings torch and nothing else, and its import is quick.

Run it with an interpreter that has setuptools, in a clone: ``python .ci/wheel_check.py``. Prints what it found; ends
with an error if something is wrong.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 0.1
"""Seconds by which importing the library may take longer than importing torch alone."""
REPEATS = 7
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")
"""Prints errors only."""


def main() -> None:
    """Build, install, check."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        check_files(wheel)
        venv.create(folder / "environment", with_pip=True)
        python = folder / "environment/bin/python"
        check_packages(python, wheel)
        check_import(python, folder)
        print(run(python.with_name("torch-anderson"), cwd=folder), end="")


def run(*command: object, cwd: Path = ROOT) -> str:
    """What a command prints; the end of this program if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}wheel check: exit code {done.returncode} of {' '.join(map(str, command))}")
    return done.stdout


def built(folder: Path) -> Path:
    """The wheel, built from a copy: setuptools would put files of earlier builds into it."""
    copy = folder / "source"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, copy)
    return next(folder.glob("*.whl"))


def check_files(wheel: Path) -> None:
    """All files belong to the library."""
    names = zipfile.ZipFile(wheel).namelist()
    others = [name for name in names if not re.match(r"torch_anderson(/|-[^/]+\.dist-info/)", name)]
    others += [name for name in names if "/lab/" in name or "experiments" in name]
    print(f"{wheel.name}: {len(names)} files")
    if others:
        sys.exit(f"wheel check: files that do not belong to the library: {others}")


def check_packages(python: Path, wheel: Path) -> None:
    """Install torch, then the wheel, which needs torch and brings nothing but itself."""
    before = with_package(python, "torch")
    brought = with_package(python, wheel) - before
    needs = run(python, "-c", "from importlib.metadata import requires as of; print(*of('torch-anderson'), sep='\\n')")
    needed = [line for line in needs.splitlines() if "extra ==" not in line]
    print(f"needs {needed}, brings besides torch and its dependencies {sorted(brought)}")
    if brought != {"torch-anderson"} or len(needed) != 1 or not re.fullmatch(r"torch>=[\d.]+", needed[0]):
        sys.exit("wheel check: the library needs other packages than torch")


def with_package(python: Path, what: object) -> set[str]:
    """Install something; returns the names of all packages that are there then."""
    run(python, *PIP, "install", "-c", ROOT / "constraints.txt", what)
    return {each["name"] for each in json.loads(run(python, "-m", "pip", "list", "--format", "json"))}


def check_import(python: Path, folder: Path) -> None:
    """Importing it takes hardly longer than importing torch."""
    code = "import time, torch; start = time.perf_counter(); import torch_anderson; print(time.perf_counter() - start)"
    seconds = statistics.median(float(run(python, "-c", code, cwd=folder)) for _ in range(REPEATS))
    print(f"import torch_anderson: {seconds:.3f} s after torch, allowed {LIMIT} s")
    if not seconds <= LIMIT:
        sys.exit("wheel check: the import takes too long")


if __name__ == "__main__":
    main()
