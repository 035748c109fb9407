"""Result folders with made-up numbers, for tests of what reads them."""

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments import results as store
from experiments.tasks import TASKS

STATS = {"attempted": 10, "accepted": 7, "rejected_residual": 2, "rejected_too_long": 1, "skipped_short_history": 4}
HARDWARE = {"processor": "Imaginary CPU", "cores": 2}
VERSIONS = {"python": "3.11.2", "torch": "2.13.0", "torch_anderson": "0.1.0"}


def decay(
    steps: int = 100, *, final: float = 1e-3, seconds: float = 1.0, every: int = 10, name: str = "mse"
) -> list[dict[str, float]]:
    """Rows of a smooth run: the metric falls from 1 to ``final`` geometrically, in ``seconds``."""
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "seconds": seconds * step / steps, "cpu_seconds": seconds * step / steps}
        row["loss"] = final ** (step / steps)
        if step % every == 0 or step == steps:
            row[name] = final ** (step / steps)
        rows.append(row)
    return rows


def write_run(
    results: Path,
    task: str,
    variant: str,
    seed: int,
    *,
    status: str = "finished",
    metrics: pd.DataFrame | Iterable[Mapping[str, Any]] | None = None,
    stats: Mapping[str, Any] | None = None,
    references: Mapping[str, Mapping[str, float]] | None = None,
    pictures: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    profile: str = "quick",
    summary: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of one run, complete; ``summary`` and ``config`` replace single keys of those files."""
    frame = pd.DataFrame(decay() if metrics is None else metrics)
    folder = store.run_folder(results, task, variant, seed)
    folder.mkdir(parents=True)
    lines = (json.dumps({k: v for k, v in row.items() if not pd.isna(v)}) for row in frame.to_dict("records"))
    store.write_bytes(folder / store.METRICS, "".join(line + "\n" for line in lines).encode())
    method, _, bracket = variant.partition("[")
    overrides = dict(pair.split("=") for pair in bracket.rstrip("]").split(",") if pair)
    written = {"task": task, "method": method, "variant": variant, "seed": seed, "profile": profile}
    written |= {
        "settings": _settings(task) if settings is None else dict(settings),
        "overrides": overrides,
        "versions": VERSIONS,
        "hardware": HARDWARE,
    }
    store.write_json(folder / store.CONFIG, {**written, "date": "2026-01-02T03:04:05+00:00", **(config or {})})
    if pictures:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **pictures)
        store.write_bytes(folder / store.PICTURES, buffer.getvalue())
    store.write_json(
        folder / store.SUMMARY,
        {**_summary(frame, status, references, _stats(method) if stats is None else stats), **(summary or {})},
    )
    return folder


def _stats(method: str) -> Mapping[str, float]:
    """Only what wraps a base in Anderson has any."""
    return STATS if method.startswith("anderson") else {}


def _settings(task: str) -> dict[str, Any]:
    """Those of the quick profile, where there is such a task."""
    known = TASKS.get(task)
    return asdict(known(**known.quick)) if known else {}


def _summary(frame: pd.DataFrame, status: str, references: Any, stats: Any) -> dict[str, Any]:
    """How the run ended, as its rows say."""
    names = [name for name in frame.columns if name not in ("step", "seconds", "cpu_seconds", "loss")]
    evaluated = frame.dropna(subset=names, how="all")[names]
    ended = {"status": status, "steps": int(frame["step"].iloc[-1]), "learning_rate": 0.01}
    ended |= {name: float(frame[name].iloc[-1]) for name in ("seconds", "cpu_seconds")}
    ended |= {"final": evaluated.iloc[-1].to_dict(), "best": evaluated.min().to_dict()}
    return ended | {"references": dict(references or {}), "stats": dict(stats)}
