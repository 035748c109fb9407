"""The examples of docs/distributed.md do what the page says, with torchrun."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PATIENCE
from torch import nn

from torch_anderson import Anderson

PAGE = "docs/distributed.md"
ROOT = Path(__file__).parents[2]
DDP, FSDP, CHECKPOINT = re.findall(r"```py\n(.*?)```", (ROOT / PAGE).read_text(encoding="utf-8"), flags=re.DOTALL)
LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
REPORT = """
weights = [getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters()]
torch.save((weights, optimizer.stats.as_dict()), f"{dist.get_rank()}.pt")
dist.destroy_process_group()
"""
SECONDS = 120 * PATIENCE


def run_examples(examples: dict[Path, str]) -> None:
    """Run them at the same time, each in another folder, continued by a checkpoint."""
    runs = [torchrun(example, folder) for folder, example in examples.items()]
    try:
        for process in runs:
            said = process.communicate(timeout=SECONDS)[1]
            assert process.returncode == 0, said
    finally:
        for process in runs:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers


def torchrun(example: str, folder: Path) -> subprocess.Popen[str]:
    """An example on two processes, in a new folder."""
    folder.mkdir()
    (folder / "program.py").write_text(example + CHECKPOINT + REPORT, encoding="utf-8")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "program.py"],
        cwd=folder,
        env={**os.environ, **LOOPBACK, "PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


INPUTS = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(model: nn.Module) -> torch.Tensor:
    """On the batches of both ranks."""
    return nn.functional.mse_loss(model(INPUTS), INPUTS.sum(1, keepdim=True))


def alone(**options: Any) -> tuple[float, dict[str, float]]:
    """Loss and counters of the same training in a single process."""
    model = network()
    optimizer = Anderson(torch.optim.SGD(model.parameters(), lr=0.02), **options)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return float(loss(model).detach()), optimizer.stats.as_dict()


@torch.no_grad()
def loss_of(weights: list[torch.Tensor]) -> float:
    model = network()
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.copy_(value)
    return float(loss(model))


@pytest.mark.slow
def test_both_examples_train_as_a_single_process_does_and_their_checkpoints_leave_them_there(tmp_path: Path):
    run_examples({tmp_path / "ddp": DDP, tmp_path / "fsdp": FSDP})
    (accelerated, expected), (plain, _) = alone(), alone(period=1000)
    assert accelerated < 0.5 * plain  # or nothing would be seen of a jump that went wrong
    for folder in tmp_path.iterdir():
        (one, counts), (other, _) = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
        assert all(map(torch.equal, one, other))
        assert counts["accepted"] == expected["accepted"] >= 3
        assert loss_of(one) == pytest.approx(accelerated, rel=0.1)
        assert all((folder / saved / ".metadata").exists() for saved in ("checkpoint", "later"))


@pytest.mark.parametrize("example", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_an_example_has_fifteen_lines(example: str):
    assert len([line for line in example.splitlines() if line and not line.startswith("#")]) <= 15
