"""Real vectors as elements of a finite ring, in which masked vectors are added.

The ring is the vectors of integers modulo 2^32. A number is clipped, scaled and rounded
to a signed integer of ``bits`` bits. Sums stay exact as long as they have 32 bits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnper.secure.messages import SecureAggregationError

Words = NDArray[np.uint32]

_RING_BITS = 32


@dataclass(frozen=True)
class Quantizer:
    """Encodes weighted vectors as integers modulo 2^32, and decodes their sum.

    Attributes
    ----------
    clip_range
        C: each number is clipped to [-C, C].
    bits
        b: an encoded number is an integer of at most q = 2^(b - 1) - 1 in magnitude.
    """

    clip_range: float
    bits: int

    @property
    def most_summands(self) -> int:
        """Most vectors that can be added without an overflow of signed 32 bits."""
        return int(2 ** (_RING_BITS - 1) - 1) // self._largest

    def encode(
        self, values: NDArray[np.float32], weight: float, rng: np.random.Generator
    ) -> Words:
        """Return ⌊weight · q / C · clip(values) + u⌋ with u uniform in [0, 1).

        The rounding is unbiased. ``values``: finite, shape (d,). ``weight``: in (0, 1].
        """
        scale = weight * self._largest / self.clip_range
        scaled = np.clip(values, -self.clip_range, self.clip_range).astype(np.float64)
        scaled *= scale
        scaled += rng.random(len(values))
        return np.floor(scaled, out=scaled).astype(np.int32).view(np.uint32)

    def decode(self, total: Words, weight_sum: float) -> NDArray[np.float64]:
        """Return the weighted sum that encoded vectors add up to, shape (d,).

        ``weight_sum``: of all summands. Raises SecureAggregationError if the sum is
        larger than summands of these weights can have.
        """
        signed = total.view(np.int32).astype(np.int64)
        # Each summand may be rounded away from zero by less than 1.
        most = self._largest * weight_sum + self.most_summands
        if signed.size and int(np.abs(signed).max()) > most:
            raise SecureAggregationError(
                "found a sum beyond what clipped updates add up to: a masked update or "
                "a share of a secret is damaged"
            )
        return np.asarray(signed * (self.clip_range / self._largest), np.float64)

    @property
    def _largest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)
