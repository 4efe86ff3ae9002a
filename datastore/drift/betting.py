"""Bets against the uniformity of p-values."""

import numpy as np
from numpy.typing import NDArray

EXPONENTS = (0.2, 0.4, 0.6, 0.8)
"""ε of the bets: the smaller, the more is won by extreme p-values."""

NUM_BETS = 2 * len(EXPONENTS)


def log_bets(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log of what each bet makes of a stake of 1.

    The power bets ε p^(ε-1) of Vovk, Nouretdinov, Gammerman, ICML 2003, win
    if p is small: the example is farther from the memory than usual. The same of 1 - p
    win if it is nearer than usual, as where a client's data narrow down to few labels.
    Each integrates to 1, so none gains on average from uniform p-values.

    Parameters
    ----------
    p_values
        In (0, 1), shape (m,).

    Returns
    -------
    NDArray
        float64, shape (m, `NUM_BETS`).
    """
    exponents = np.array(EXPONENTS)
    logs = np.stack([np.log(p_values), np.log1p(-p_values)], axis=1)
    bets: NDArray[np.float64] = np.log(exponents) + (exponents - 1) * logs[:, :, None]
    return bets.reshape(len(p_values), NUM_BETS)
