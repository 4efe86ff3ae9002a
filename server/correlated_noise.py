"""Noise that partly cancels from round to round, for clients that take part in turn.

DP-FTRL with a banded square root of the matrix of prefix sums (Kalinin and Lampert
2024, "Banded Square Root Matrix Factorization for Differentially Private Model
Training"). A client takes part once in b releases, and C is the lower triangular
Toeplitz matrix of the coefficients

    c_i = binom(2 i, i) / 4^i    for i < b, else 0

The releases are (G + C^-1 Z) with the sums G and independent Gaussian rows Z, which is
C^-1 (C G + Z). Columns of C that are b apart have no row in common. So k releases with
a client change C G by at most S ‖c‖ √k, and cost as much as k Gaussian releases in
which Z has the standard deviation σ S ‖c‖ (Choquette-Choo et al. 2023, "(Amplified)
Banded Matrix Factorization"), also where the sums depend on earlier releases (Denisov
et al. 2022). The sum of the noise over the rounds, which the model keeps, is smaller
than that of independent noise.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Noise = NDArray[np.float64]


def coefficients(band: int) -> Noise:
    """Return c, shape (band,): 1, 1/2, 3/8, ..."""
    steps = np.arange(1, band)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))


class CorrelatedNoise:
    """The rows of C^-1 Z, one after the other.

    It keeps the last b - 1 rows in memory. A process that begins after ``num_rows``
    rows without them, as after a crash, begins another matrix, with the same guarantee
    and more noise.
    """

    def __init__(self, band: int, num_rows: int = 0) -> None:
        self._coefficients = coefficients(band)
        self._recent: deque[Noise] = deque(maxlen=max(1, band - 1))
        self._num_rows = num_rows

    def row(self, number: int, independent: Callable[[int], Noise]) -> Noise:
        """Return the last row or a later one, counted from 1.

        ``independent`` returns a row of Z, (d,), for each row up to this one.
        """
        for missing in range(self._num_rows + 1, number + 1):
            row = independent(missing)
            for coefficient, earlier in zip(
                self._coefficients[1:], self._recent, strict=False
            ):
                row = row - coefficient * earlier
            self._recent.appendleft(row)
        self._num_rows = number
        return self._recent[0]
