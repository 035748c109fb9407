"""``python -m torch_anderson.lab``: the same as ``torch-anderson``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
