"""In which order a client's examples are trained on."""

from collections.abc import Iterator

import torch
from torch import Tensor

from knnper.config.seeding import RandomKey


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Return the number of mini-batches in one pass; 0 without examples."""
    return num_examples // min(batch_size, num_examples) if num_examples else 0


def mini_batches(
    num_examples: int, batch_size: int, rng: RandomKey
) -> Iterator[Tensor]:
    """Yield the positions of each mini-batch, int64 of shape (batch,), without end.

    Each epoch is a new permutation. The incomplete last batch is left out when a full
    one came before it: a batch of one or two ruins BatchNorm's statistics.

    Parameters
    ----------
    num_examples
        With none, nothing is yielded.
    batch_size
        Of a full batch.
    rng
        Fixes the order.
    """
    shuffler = rng.child("batches").numpy()
    per_epoch = steps_per_epoch(num_examples, batch_size)
    size = min(batch_size, num_examples)
    while num_examples:
        order = shuffler.permutation(num_examples)
        for place in range(per_epoch):
            yield torch.from_numpy(order[place * size : (place + 1) * size])
