"""Examples as a mapping of arrays: what an .npz file or a Python function gives."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.config.suggestions import alternatives
from knnper.data.site.array_inputs import ArrayInputs
from knnper.data.site.collected import Collected
from knnper.data.site.splits import SPLITS, Split

Arrays = Mapping[str, NDArray[Any]]

PER_SPLIT = tuple(
    f"{split}_{what}" for split in SPLITS for what in ("inputs", "labels", "names")
)
WHOLE = ("inputs", "labels", "names", "split")
CLASS_NAMES = "class_names"
KEYS = (*WHOLE, *PER_SPLIT, CLASS_NAMES)
_LAYOUT = (
    "expected inputs and labels, or train_inputs and train_labels and the same of "
    "validation and test"
)


def collect_arrays(arrays: Arrays, source: str) -> Collected:
    """Return the examples in ``arrays``.

    Parameters
    ----------
    arrays
        Either ``inputs`` (n, ...) and ``labels`` (n,), optionally ``names`` (n,) and
        ``split`` (n,) with the texts train, validation and test; or ``train_inputs``,
        ``train_labels``, optionally ``train_names``, and the same of validation and
        test. Labels are names of classes, or whole numbers: positions in
        ``class_names``, where this is there.
    source
        Named in errors.

    Raises
    ------
    DataError
        If arrays are missing, or of other lengths or types than they should be.
    """
    if any(key in arrays for key in PER_SPLIT):
        parts = [_part(arrays, split, source) for split in _given(arrays, source)]
        return _joined(parts, arrays, source)
    return _whole(arrays, source)


def _whole(arrays: Arrays, source: str) -> Collected:
    inputs, labels = _pair(arrays, "", source)
    names = _names(arrays, "names", len(inputs), "", source)
    splits = None
    if "split" in arrays:
        splits = split_texts(_texts(arrays, "split", len(inputs), source), source)
    texts, numbered = _label_texts(labels, arrays.get(CLASS_NAMES), source)
    return Collected(
        source=source,
        names=names,
        labels=texts,
        inputs=ArrayInputs(source, inputs),
        splits=splits,
        given_splits=frozenset(splits or ()),
        numbered=numbered,
    )


def _given(arrays: Arrays, source: str) -> list[Split]:
    """Return the splits that there are; train must be among them."""
    both = [key for key in WHOLE if key in arrays]
    if both or "train_inputs" not in arrays:
        found = ", ".join(sorted(arrays))
        raise DataError(f"{source}: found the arrays {found}; {_LAYOUT}")
    return [split for split in SPLITS if _has(arrays, split)]


def _has(arrays: Arrays, split: Split) -> bool:
    return any(f"{split}_{what}" in arrays for what in ("inputs", "labels"))


_Part = tuple[Split, NDArray[Any], NDArray[Any], tuple[str, ...]]


def _part(arrays: Arrays, split: Split, source: str) -> _Part:
    inputs, labels = _pair(arrays, f"{split}_", source)
    names = _names(arrays, f"{split}_names", len(inputs), f"{split}/", source)
    return split, inputs, labels, names


def _joined(parts: Sequence[_Part], arrays: Arrays, source: str) -> Collected:
    forms = {(inputs.shape[1:], inputs.dtype) for _, inputs, _, _ in parts}
    if len(forms) > 1:
        found = ", ".join(f"{s}: {i.dtype} {i.shape}" for s, i, _, _ in parts)
        raise DataError(
            f"{source}: the inputs of the splits differ in form ({found}); expected "
            "the same shape but for the number, and the same type"
        )
    labels = np.concatenate([labels for _, _, labels, _ in parts])
    texts, numbered = _label_texts(labels, arrays.get(CLASS_NAMES), source)
    return Collected(
        source=source,
        names=tuple(name for *_, names in parts for name in names),
        labels=texts,
        inputs=ArrayInputs(source, np.concatenate([inputs for _, inputs, *_ in parts])),
        splits=tuple(split for split, inputs, *_ in parts for _ in inputs),
        given_splits=frozenset(split for split, *_ in parts),
        numbered=numbered,
    )


def _pair(
    arrays: Arrays, prefix: str, source: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and labels, one label for each input."""
    for what in ("inputs", "labels"):
        if f"{prefix}{what}" not in arrays:
            raise DataError(f"{source}: found no array {prefix}{what}; {_LAYOUT}")
    inputs, labels = arrays[f"{prefix}inputs"], arrays[f"{prefix}labels"]
    if inputs.ndim < 2 or labels.shape != inputs.shape[:1]:
        raise DataError(
            f"{source}: found {prefix}inputs of shape {inputs.shape} and "
            f"{prefix}labels of shape {labels.shape}; expected (n, ...) and (n,)"
        )
    return inputs, labels


def _label_texts(
    labels: NDArray[Any], class_names: NDArray[Any] | None, source: str
) -> tuple[tuple[str, ...], bool]:
    """Return the labels as texts, and whether they are numbers without names."""
    if labels.dtype.kind == "U":
        return tuple(labels.tolist()), False
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{source}: found labels of {labels.dtype}, expected whole numbers, or the "
            "names of classes as texts"
        )
    if class_names is None or not class_names.size:
        return tuple(map(str, labels.tolist())), True
    names = [str(name) for name in class_names.ravel()]
    if labels.size and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            f"{source}: labels: expected values in [0, {len(names)}), the positions in "
            f"its class_names, found {labels.min()} to {labels.max()}"
        )
    return tuple(names[label] for label in labels.tolist()), False


def _names(
    arrays: Arrays, key: str, num_rows: int, prefix: str, source: str
) -> tuple[str, ...]:
    if key not in arrays:
        return tuple(f"{prefix}{row:05d}" for row in range(num_rows))
    return _texts(arrays, key, num_rows, source)


def _texts(arrays: Arrays, key: str, num_rows: int, source: str) -> tuple[str, ...]:
    array = arrays[key]
    if array.dtype.kind not in "Uiu" or array.shape != (num_rows,):
        raise DataError(
            f"{source}: {key}: expected texts of shape ({num_rows},), found "
            f"{array.dtype} of shape {array.shape}"
        )
    return tuple(str(one) for one in array.tolist())


def split_texts(texts: Sequence[str], source: str) -> tuple[Split, ...]:
    """Return ``texts``, each of which says a split.

    Raises
    ------
    DataError
        With the first one that does not, and their number.
    """
    wrong = Counter(text for text in texts if text not in SPLITS)
    if wrong:
        text, count = wrong.most_common(1)[0]
        raise DataError(
            f"{source}: found the split {text!r} in {count} examples; "
            f"{alternatives(text, SPLITS)}"
        )
    return tuple(cast("Split", text) for text in texts)
