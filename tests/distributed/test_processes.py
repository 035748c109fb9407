"""The harness itself: a test that cannot fail would hide all that the others look for."""

import faulthandler
import os
import time

import pytest
import torch
import torch.distributed as dist
from processes import RankFailed, run


def total():
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item()


def test_ranks_talk_to_each_other():
    assert run(3, total) == [6.0, 6.0, 6.0]


def test_an_error_on_one_rank_is_shown_and_the_others_are_stopped():
    def raise_on_one():
        if dist.get_rank() == 1:
            raise KeyError("mine")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 0 did not come to an end.*KeyError: 'mine'"):
        run(2, raise_on_one)
    assert time.monotonic() - start < 20


def crash_unless(path):
    """An interpreter that dies the first time, or always."""
    if dist.get_rank() and not (path and path.exists()):
        if path:
            path.touch()
        faulthandler.disable()  # no need to tell
        os.abort()


def test_a_crash_of_the_interpreter_is_tried_once_more(tmp_path):
    with pytest.warns(UserWarning, match="rank 1 ended with exit code -6"):
        run(2, crash_unless, tmp_path / "crashed")
    with pytest.warns(UserWarning), pytest.raises(RankFailed, match="rank 1 ended with exit code -6"):
        run(2, crash_unless, None)


def test_a_rank_that_hangs_or_dies_is_a_failure():
    with pytest.raises(RankFailed, match="rank 1 did not come to an end"):
        run(2, lambda: time.sleep(60 if dist.get_rank() else 0), seconds=1)
    with pytest.raises(RankFailed, match="rank 1 ended with exit code 3"):
        run(2, lambda: os._exit(3) if dist.get_rank() else None)
