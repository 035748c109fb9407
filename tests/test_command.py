"""The command `torch-anderson`, which says whether an installation works."""

import subprocess
import sys

import pytest

import torch_anderson.__main__ as command


def test_the_command_prints_versions_and_its_checks_pass() -> None:
    done = subprocess.run([sys.executable, "-m", "torch_anderson"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch-anderson {command.__version__}, torch " in done.stdout
    assert done.stdout.count("ok") >= len(command.CHECKS) and "FAILED" not in done.stdout


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_a_wrong_result_is_told_and_gives_exit_code_1(error, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["torch-anderson"])
    monkeypatch.setattr(command, "CHECKS", {"wrong": lambda device: (error, 1e-6)})
    assert command.main() == 1
    assert "FAILED  wrong" in capsys.readouterr().out


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("run", 2)])
def test_arguments_are_answered_with_what_it_does(word, code, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["torch-anderson", word])
    assert command.main() == code
    assert "self-check" in capsys.readouterr().out
