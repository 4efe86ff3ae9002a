"""Examples on their way into a store: checked, and given the ids they would get."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from datastore.contents import Contents
from datastore.core.rows import Change, Rows
from datastore.examples import NewExamples, Selection, StoreSpec
from datastore.policy.base import Decision
from datastore.validation import require_embeddings, require_labels
from knnper.config.errors import DataError

LATEST_ARRIVAL = 253_402_300_800.0
"""The end of the year 9999, seconds since 1970: what a date can say."""


def require_fitting(new: NewExamples, spec: StoreSpec, embedding_dim: int) -> None:
    """Refuse examples that are not what the store is made for.

    Raises
    ------
    DataError
        With what was found and expected.
    """
    require_embeddings("embeddings to add", new.embeddings, embedding_dim)
    require_labels(new.labels, len(new.embeddings), spec.num_classes)
    _require_inputs(new.inputs, spec, len(new))
    if new.arrivals is not None:
        require_arrivals(new.arrivals, len(new))
    if new.external_ids is not None:
        _require_names(new.external_ids, len(new))


def require_arrivals(arrivals: Tensor, num_rows: int) -> None:
    """Refuse anything but seconds since 1970, float64 of shape (num_rows,).

    Raises
    ------
    DataError
        With the shape, or the first that is before 1970 or after the year 9999.
    """
    shape = tuple(arrivals.shape)
    if shape != (num_rows,) or arrivals.dtype != torch.float64:
        raise DataError(
            f"arrivals: expected float64 of shape ({num_rows},), seconds since 1970, "
            f"found {arrivals.dtype} of shape {shape}"
        )
    if not bool(torch.isfinite(arrivals).all()):
        raise DataError("arrivals: expected finite seconds, found NaN or infinity")
    strange = (arrivals < 0) | (arrivals >= LATEST_ARRIVAL)
    if bool(strange.any()):
        row = int(strange.nonzero()[0])
        raise DataError(
            "arrivals: expected seconds since 1970, up to the year 9999, found "
            f"{float(arrivals[row]):g} in row {row}; divide milliseconds by 1000"
        )


def require_new_names(rows: Rows, new: NewExamples) -> None:
    """Refuse external ids that occur twice, in the batch or with the stored ones.

    Raises
    ------
    DataError
        With the first of them.
    """
    names = [name for name in new.external_ids or () if name is not None]
    if not names:
        return
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"external ids: found {twice!r} twice among the examples to add, expected "
            "each once; nothing was added"
        )
    taken = rows.select(Selection(external_ids=tuple(names)))
    if len(taken):
        name = rows.external_ids(taken[:1])[0]
        raise DataError(
            f"external ids: {name!r} is stored already (and {len(taken) - 1} others of "
            "this batch), expected new ones; nothing was added. Leave them out, or "
            "delete the stored ones first"
        )


def arriving(new: NewExamples, num_offered: int, stored: Contents) -> Contents:
    """Return ``new`` as a policy sees it.

    Parameters
    ----------
    new
        Where no arrivals are given they arrive now, and after all that are stored: a
        clock that was set back must not make them the oldest.
    num_offered
        How many examples came before.
    stored
        What the store holds.
    """
    first = num_offered + 1
    clock = max(time.time(), float(stored.arrivals.max(initial=0.0)))
    now = torch.full((len(new),), clock, dtype=torch.float64)
    arrivals = now if new.arrivals is None else new.arrivals
    return Contents(
        np.arange(first, first + len(new), dtype=np.int64),
        new.labels.numpy(),
        arrivals.numpy(),
    )


def addition(
    new: NewExamples, offered: Contents, decision: Decision, version: int
) -> Change:
    """Return the change of a store, by which ``version`` is searched, as decided."""
    kept = decision.kept
    names = new.external_ids or (None,) * len(new)
    return Change(
        stream=decision.state,
        added=offered.take(kept),
        embeddings=new.embeddings.detach().numpy()[kept],
        version=version,
        inputs=None if new.inputs is None else new.inputs.numpy()[kept],
        external_ids=[name for name, stays in zip(names, kept, strict=True) if stays],
        removed=decision.evicted,
    )


def _require_inputs(inputs: Tensor | None, spec: StoreSpec, num_rows: int) -> None:
    if spec.input is None:
        if inputs is not None:
            raise DataError(
                "inputs: found some, but the store was created to keep none; leave "
                "them out, or create a store whose spec gives their layout"
            )
        return
    expected = (num_rows, *spec.input.shape)
    if inputs is None:
        raise DataError(
            f"inputs: found none, expected {spec.input.dtype} of shape {expected}: the "
            "store keeps them, to embed them again by another model"
        )
    if tuple(inputs.shape) != expected or inputs.dtype != spec.input.torch_dtype:
        raise DataError(
            f"inputs: expected {spec.input.dtype} of shape {expected}, found "
            f"{inputs.dtype} of shape {tuple(inputs.shape)}"
        )


def _require_names(names: Sequence[str | None], num_rows: int) -> None:
    if len(names) != num_rows:
        raise DataError(
            f"external ids: expected one, or None, for each of {num_rows} examples, "
            f"found {len(names)}"
        )
    for name in names:
        if name is not None and not _can_be_stored(name):
            raise DataError(
                f"external ids: found {name!r}, expected at least one character, each "
                "of which can be written as UTF-8, and no NUL"
            )


def _can_be_stored(name: str) -> bool:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return False
    return bool(encoded) and b"\0" not in encoded
