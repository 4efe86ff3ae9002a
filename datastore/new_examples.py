"""Checks of new examples before they are added to a store."""

from collections.abc import Sequence

import torch
from torch import Tensor

from knnper.datastore.database import Rows
from knnper.datastore.examples import (
    NewExamples,
    Selection,
    StoreSpec,
    require_embeddings,
    require_labels,
)
from knnper.errors import DataError

# The end of the year 9999, the last that dates can show, in seconds since 1970.
LATEST_ARRIVAL = 253_402_300_800.0


def require_new_examples(new: NewExamples, spec: StoreSpec, embedding_dim: int) -> None:
    """Reject examples that do not fit the specification of the store."""
    require_embeddings("embeddings to add", new.embeddings, embedding_dim)
    require_labels(new.labels, len(new.embeddings), spec.num_classes)
    _require_inputs(new.inputs, spec, len(new))
    if new.arrivals is not None:
        require_arrivals(new.arrivals, len(new))


def require_arrivals(arrivals: Tensor, num_rows: int) -> None:
    """Reject anything but seconds since 1970, float64 of shape (num_rows,)."""
    shape = tuple(arrivals.shape)
    if shape != (num_rows,) or arrivals.dtype != torch.float64:
        raise DataError(
            f"arrivals: expected float64 of shape ({num_rows},), seconds since 1970, "
            f"found {arrivals.dtype} of shape {shape}"
        )
    if not bool(torch.isfinite(arrivals).all()):
        raise DataError("arrivals: expected finite seconds, found NaN or infinity")
    is_outside = (arrivals < 0) | (arrivals >= LATEST_ARRIVAL)
    if bool(is_outside.any()):
        row = int(is_outside.nonzero()[0])
        raise DataError(
            "arrivals: expected seconds since 1970, up to the year 9999, found "
            f"{float(arrivals[row]):g} in row {row}; divide milliseconds by 1000"
        )


def require_external_ids(
    rows: Rows, external_ids: Sequence[str | None], num_rows: int
) -> None:
    """Reject names that cannot be stored, occur twice or are stored already."""
    if len(external_ids) != num_rows:
        raise DataError(
            f"external ids: expected a name, or None, for each of {num_rows} examples, "
            f"found {len(external_ids)}"
        )
    names = [name for name in external_ids if name is not None]
    has_duplicates = len(set(names)) < len(names)
    for name in names:
        # Half of a surrogate pair cannot be encoded as UTF-8.
        if not name or any(
            character == "\0" or "\ud800" <= character <= "\udfff" for character in name
        ):
            raise DataError(
                f"external ids: found {name!r}, expected at least one character, "
                "only characters that UTF-8 can encode, and no NUL"
            )
        if has_duplicates and names.count(name) > 1:
            raise DataError(
                f"external ids: found {name!r} twice among the examples to add, "
                "expected each once; nothing was added"
            )
    stored = rows.select(Selection(external_ids=tuple(names)))
    if len(stored):
        raise DataError(
            f"external ids: {rows.external_ids(stored[:1])[0]!r} is stored already "
            f"(and {len(stored) - 1} others of this batch), expected new names; "
            "nothing was added. Leave them out, or delete the stored examples first"
        )


def _require_inputs(inputs: Tensor | None, spec: StoreSpec, num_rows: int) -> None:
    if spec.input is None:
        if inputs is not None:
            raise DataError(
                "inputs: found inputs, but this store keeps none; leave them out, or "
                "create a store with a layout of inputs in its spec"
            )
        return
    expected = (num_rows, *spec.input.shape)
    if inputs is None:
        raise DataError(
            f"inputs: found none, expected {spec.input.dtype} of shape {expected}: the "
            "store keeps them for re-embedding by another model"
        )
    if tuple(inputs.shape) != expected or inputs.dtype != spec.input.torch_dtype:
        raise DataError(
            f"inputs: expected {spec.input.dtype} of shape {expected}, found "
            f"{inputs.dtype} of shape {tuple(inputs.shape)}"
        )
