"""A data set without content: labels, and who and where each sample belongs to."""

import numpy as np

from knnper.data.examples import Dataset, InputSpec, LabelledArrays


def arrays_of(count: int) -> LabelledArrays:
    return LabelledArrays(
        images=np.zeros((count, 2, 2, 1), dtype=np.uint8),
        labels=np.arange(count) % 4,
        client_ids=np.arange(count) % 3,
        domain_ids=np.arange(count) // 4 % 2,
    )


DATASET = Dataset(
    name="toy",
    train=arrays_of(200),
    test=arrays_of(40),
    spec=InputSpec((2, 2, 1), 4, (0.5,), (0.5,)),
    class_names=("a", "b", "c", "d"),
    coarse_of=(0, 0, 1, 1),
    domain_names=("painting", "photo"),
)
