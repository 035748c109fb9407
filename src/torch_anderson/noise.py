"""What the Gram matrix of residual differences tells about noise.

Let r_i = s_i + e_i, with s smooth and e independent from pair to pair, of mean square v. Then consecutive differences
d have

    |d_i|^2 = |ds|^2 + 2 v        <d_i, d_{i-1}> = |ds|^2 - v

and their cosine c tells how much of |d|^2 is noise: 2 v / |d|^2 = 2 (1 - c) / 3. Whatever else keeps the residuals
from changing smoothly, such as momentum that a jump leaves behind, counts as noise too: it spoils the fit alike.
"""

from collections.abc import Sequence
from math import sqrt


def smoothness(gram: Sequence[Sequence[float]], rows: int) -> float:
    """Mean cosine between consecutive differences of residuals, over the newest ``rows``: near 1 for a smooth path,
    0 for smoothed noise, -0.5 for white noise. Without evidence, 1.

    >>> smoothness([[1.0], [1.0, 1.0], [-1.0, -1.0, 1.0]], rows=3)
    0.0
    """
    pairs = [(gram[i + 1][i], gram[i][i] * gram[i + 1][i + 1]) for i in range(min(rows, len(gram)) - 1)]
    cosines = [product / sqrt(squares) for product, squares in pairs if squares > 0]
    return sum(cosines) / len(cosines) if cosines else 1.0


def noise_share(gram: Sequence[Sequence[float]]) -> float:
    """The part of the squared residual differences that is noise, from 0 to 1.

    >>> noise_share([[1.0], [1.0, 1.0]]), noise_share([[1.0], [-0.5, 1.0]])
    (0.0, 1.0)
    """
    return min(max(2 * (1 - smoothness(gram, len(gram))) / 3, 0.0), 1.0)
