"""What each part of the control of tangent jumps is worth: equations solved with one part switched off at a time.

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.tangent_ablation burgers helmholtz --seeds 0 1 --seconds 15

Parts are switched off by other values of the constants and functions of the modules that define them; there are no
options for it. A number is the relative L2 error after the same processor time; "factor" is the geometric mean of
errors over that of all parts together: above 1, the part helps.
"""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from experiments.benchmarks.report import header, table
from experiments.benchmarks.tangent_equations import solve
from torch_anderson._gauss_newton import control, jump
from torch_anderson._gauss_newton.objective import Retained


def fresh(self: Any, samples: Any) -> Any:
    """Keep no sample."""
    return samples


def shorten(search: Any) -> None:
    """Try shorter lengths while the loss does not fall."""
    last = search.trials[-1]
    while not search.falls and last.length > jump.SHORTEST:
        last = search.try_length(max(last.length / 4, jump.SHORTEST))


def two_lengths(search: Any, length: float, longer: bool) -> None:
    """Try two lengths, and shorter ones while the loss does not fall, without a model of the loss between them."""
    search.try_length(length)
    search.try_length(2 * length if longer and length <= jump.LONGEST / 2 else length / 2)
    shorten(search)
    best = search.best.length
    search.expected = 2 * best if best >= length else best


def one_length(search: Any, length: float, longer: bool) -> None:
    """Try the full jump, and shorter ones while the loss does not fall."""
    search.try_length(1.0)
    shorten(search)
    search.expected = search.best.length


def damped_by(power: int) -> Callable[..., float]:
    """Damping that grows with this power of the number of rows."""
    return lambda self, loss, trace, all_fitted: control.DAMPING * self.whole_blocks**power * loss * self.boost


VARIANTS: dict[str, list[tuple[Any, str, Any]]] = {
    "all parts": [],
    "no momentum": [(jump, "MOMENTUM", 0.0)],
    "momentum 0.9": [(jump, "MOMENTUM", 0.9)],
    "no term of third order": [(jump, "MOST_THIRD_ORDER", 0.0)],
    "no geodesic acceleration": [(jump, "MOST_SECOND_ORDER", 0.0), (jump, "MOST_THIRD_ORDER", 0.0)],
    "no retained samples": [(Retained, "renew", fresh)],
    "no growth of rows": [(control, "GROWTH", 1.0)],
    "no interpolation in the search": [(jump.Search, "run", two_lengths)],
    "no search: the full jump, then shorter ones": [(jump.Search, "run", one_length)],
    "no more damping after a refused jump": [(control, "BOOST", 1.0)],
    "damping independent of the number of rows": [(control.State, "damping", damped_by(0))],
    "damping by the square of the number of rows": [(control.State, "damping", damped_by(2))],
}


@contextlib.contextmanager
def without(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """A context in which names have other values."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("equations", nargs="*", default=["burgers", "helmholtz"], metavar="EQUATION")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(header(), flush=True)
    runs = [(name, seed) for name in arguments.equations for seed in arguments.seeds]
    rows, reference = [], None
    for variant in arguments.variants:
        with without(VARIANTS[variant]):
            errors = [solve(name, seed, arguments.seconds, torch.float64)[0] for name, seed in runs]
        mean = math.exp(sum(map(math.log, errors)) / len(errors))
        reference = reference or mean
        rows.append([variant, *(f"{error:.1e}" for error in errors), f"{mean / reference:.2g}"])
        print(*rows[-1], sep=" | ", flush=True)
    print("\n" + table(rows, ["variant", *(f"{name}, seed {seed}" for name, seed in runs), "factor"]))


if __name__ == "__main__":
    main()
