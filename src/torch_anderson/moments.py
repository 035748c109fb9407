"""Inner products of all that a candidate is made of: ranks judge a jump by them that none of them sees as a whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .extrapolation import Weights


class Moments:
    """The Gram matrix of residual differences, last residual and map differences: of the rows Z of ``History``.

    The products that the least-squares problem needs are among them. The others cost another pass over a part of the
    history, but save the ranks a second message for each acceleration.
    """

    def __init__(self, size: int):
        self.size = size
        self.reset()

    def reset(self) -> None:
        """Nothing is known."""
        self.matrix = torch.zeros(2 * self.size + 1, 2 * self.size + 1, dtype=torch.float64)
        self.complete = False  # whether older rows are known too

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Where rows stored in these slots, and the last residual between them, are found among Z."""
        return [*slots, self.size, *(self.size + 1 + slot for slot in slots)]

    def update(self, rows: Sequence[int], products: Tensor) -> None:
        """Take over the products of all rows with these."""
        self.matrix[:, rows] = products
        self.matrix[rows, :] = products.T

    def of_correction(self, weights: Weights[list[float]], slots: Sequence[int]) -> tuple[float, float]:
        """(e . r / lr, e . e) of the correction e with these weights of the rows in ``slots``.

        >>> moments = Moments(1)  # residual difference 1, last residual 2, map difference 3
        >>> moments.update([0, 1, 2], torch.tensor([[1.0, 2, 3], [2, 4, 6], [3, 6, 9]]).double())
        >>> moments.of_correction(Weights([1.0], [2.0], 0.5), [0])  # e = 3 + 2 + 1
        (12.0, 36.0)
        """
        rows = self.rows(slots)
        parts = [*(weights.residual_rows or [0.0] * len(slots)), weights.residual, *weights.map_rows]
        e = torch.zeros(len(self.matrix), dtype=torch.float64)
        e[rows] = torch.tensor(parts, dtype=torch.float64)
        products = self.matrix @ e
        return float(products[self.size]), float(e @ products)
