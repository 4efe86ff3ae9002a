"""A sample of the server's own examples on its way to a client."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from knnper.data.examples import TORCH_DTYPES, Examples, InputSpec, no_examples
from strategies.core.records import Record
from strategies.core.task import Task


@dataclass(frozen=True)
class Sample(Record):
    """Some of the server's examples; float32 holds their values exactly.

    Attributes
    ----------
    images
        Shape (n, height, width, channels), not scaled.
    labels
        Shape (n,).
    """

    images: Tensor
    labels: Tensor


def draw_sample(task: Task, most: int, rng: RandomKey) -> Sample:
    """Return ``most`` of the server's examples at random, all if there are fewer.

    Raises
    ------
    RunError
        If it has none.
    """
    proxy = no_examples(task.spec) if task.proxy is None else task.proxy()
    if len(proxy) == 0:
        raise RunError(
            "a sample of the server's examples is to be sent to a client, and the "
            "server has none; expected partition.proxy_fraction above 0, or another "
            "personalization, such as fine_tuning"
        )
    drawn = _some(proxy, most, rng)
    return Sample(drawn.images.float(), drawn.labels.float())


def taken(
    sample: Sample | None, spec: InputSpec, count: int, rng: RandomKey
) -> Examples:
    """Return ``count`` examples of a sample at random, all if there are fewer.

    Parameters
    ----------
    sample
        What the client was sent; None gives no examples.
    spec
        Gives the type of the images.
    count
        How many are taken.
    rng
        Fixes which.
    """
    if sample is None:
        return no_examples(spec)
    images = sample.images.to(TORCH_DTYPES[spec.dtype])
    return _some(Examples(images, sample.labels.to(torch.int64)), count, rng)


def _some(examples: Examples, count: int, rng: RandomKey) -> Examples:
    positions = rng.numpy().permutation(len(examples))[:count]
    return examples.take(torch.from_numpy(np.sort(positions)))
