"""`torchrun --nproc-per-node N -m torch_anderson.lab.imagenet --data DIR`, or without torchrun on one process."""

import logging
import sys
from collections.abc import Sequence

import tyro

from ..data import MissingData
from ..screen import complain
from .parallel import process_group
from .settings import BadSettings, Settings
from .training import Training

OK, BAD_INPUT = 0, 2


def main(args: Sequence[str] | None = None) -> int:
    """Execute a command line; returns the exit code. Errors that users can fix are printed without a traceback."""
    logging.basicConfig(format="%(message)s")
    try:
        settings = tyro.cli(Settings, args=args, prog="torch_anderson.lab.imagenet")
        with process_group() as device:
            Training(settings, device).run()
    except (BadSettings, MissingData) as error:
        complain(f"torch_anderson.lab.imagenet: {error}")
        return BAD_INPUT
    return OK


if __name__ == "__main__":
    sys.exit(main())
