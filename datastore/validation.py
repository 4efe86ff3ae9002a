"""What may be stored and asked."""

import numpy as np
import torch
from torch import Tensor

from knnper.config.errors import DataError

_TOLERANCE = 1e-4  # far above float32's rounding, far below what logits differ by


def require_embeddings(
    what: str, embeddings: Tensor, embedding_dim: int | None = None
) -> None:
    """Refuse anything but finite float32 of shape (n, p).

    Parameters
    ----------
    what
        Names the tensor in the message.
    embeddings
        What was given.
    embedding_dim
        The p that is expected; None takes any.

    Raises
    ------
    DataError
        With the shape, or the first row that is not finite.
    """
    shape = tuple(embeddings.shape)
    if len(shape) != 2 or embeddings.dtype != torch.float32:
        raise DataError(
            f"{what}: expected float32 of shape (n, p), found {embeddings.dtype} of "
            f"shape {shape}"
        )
    if embedding_dim is not None and shape[1] != embedding_dim:
        raise DataError(
            f"{what}: expected {embedding_dim} numbers in a row, as in the store, "
            f"found {shape[1]}; embed them with the model that filled the store"
        )
    rows = embeddings.detach().numpy()
    finite = np.isfinite(rows)
    if not finite.all():
        raise DataError(
            f"{what}: expected finite numbers, found NaN or infinity in row "
            f"{int((~finite.all(axis=1)).argmax())}; the model that embedded it has "
            "diverged or its input is not a valid image"
        )


def require_labels(labels: Tensor, num_rows: int, num_classes: int) -> None:
    """Refuse anything but int64 of shape (num_rows,) with values in [0, c).

    Raises
    ------
    DataError
        With the shape, or the first label that is out of range.
    """
    shape = tuple(labels.shape)
    if shape != (num_rows,) or labels.dtype != torch.int64:
        raise DataError(
            f"labels: expected int64 of shape ({num_rows},), one for each embedding, "
            f"found {labels.dtype} of shape {shape}"
        )
    valid = (labels >= 0) & (labels < num_classes)
    if not bool(valid.all()):
        row = _first_false(valid)
        raise DataError(
            f"labels: expected values in [0, {num_classes}), found {int(labels[row])} "
            f"in row {row}; correct the number of classes or the label"
        )


def require_probabilities(what: str, probabilities: Tensor) -> None:
    """Refuse anything but (n, c) with values in [0, 1] and rows that sum to 1.

    Raises
    ------
    ValueError
        With the shape, or the first row that is not a distribution.
    """
    if probabilities.dim() != 2:
        raise ValueError(
            f"{what}: expected probabilities of shape (n, c), found shape "
            f"{tuple(probabilities.shape)}"
        )
    in_range = ((probabilities >= 0) & (probabilities <= 1 + _TOLERANCE)).all(dim=1)
    sums_to_one = (probabilities.sum(dim=1) - 1).abs() <= _TOLERANCE
    valid = in_range & sums_to_one
    if not bool(valid.all()):
        row = _first_false(valid)
        raise ValueError(
            f"{what}: expected probabilities, found {probabilities[row].tolist()} in "
            f"row {row}; pass logits through a softmax first"
        )


def _first_false(flags: Tensor) -> int:
    return int((~flags).nonzero()[0])
