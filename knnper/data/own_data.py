"""Data that a user's function returns."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnper.data.arrays import (
    ALIASES,
    CLIENT_KEYS,
    KEYS,
    Arrays,
    TestFraction,
    build_dataset,
    collect_arrays,
    rename_aliases,
)
from knnper.data.examples import Dataset
from knnper.data.features import drop_index_columns, order_by_name
from knnper.data.site_data import CollectedExamples, LabelSettings, SiteData
from knnper.data.site_inputs import ArrayInputs, fit_inputs
from knnper.data.site_task import SiteTask
from knnper.errors import DataError, OwnCodeError
from knnper.own import Kind, arguments, explained, given_to
from knnper.settings import Choice, NonNegativeInt, Settings, alternatives

OWN_SITE_DATA = Kind(
    "a function that returns SiteData, or a mapping of arrays (inputs and labels)",
    base=LabelSettings,
    supplied=("base", "task"),
)
"""A site's own data function: ``f(base, task, **settings)``.

``base`` is the folder of the client's file, ``task`` the `SiteTask`, or None if it is
not known yet. A function without these parameters is called without them.
"""


def collect_own(
    choice: Choice[Settings], base: Path, task: SiteTask | None
) -> CollectedExamples:
    """Call a site's own function and collect its examples; see `OWN_SITE_DATA`."""
    context = given_to(choice.entry, base=base, task=task)
    with explained():
        returned = choice.entry(**context, **arguments(choice.settings, LabelSettings))
    return _collect_returned(returned, choice.name)


def _collect_returned(returned: object, source: str) -> CollectedExamples:
    if isinstance(returned, SiteData):
        return _collect_site_data(returned, source)
    return collect_arrays(
        rename_aliases(_require_arrays(returned, source, KEYS), source), source
    )


def _require_arrays(returned: object, source: str, known: Collection[str]) -> Arrays:
    """Convert a returned mapping to arrays; raise for other types and names."""
    if not isinstance(returned, Mapping):
        raise OwnCodeError(
            f"{source} returned {type(returned).__name__}, expected a mapping of "
            f"arrays such as {', '.join(list(known)[:2])}, or a data set"
        )
    for key in returned:
        if key not in known and key not in ALIASES:
            raise OwnCodeError(
                f"{source} returned an array {key!r}; {alternatives(str(key), known)}"
            )
    columns = _common_columns(returned, source)
    try:
        arrays = {
            key: np.asarray(value[columns] if columns and _is_input(key) else value)
            for key, value in returned.items()
        }
    except (TypeError, ValueError, RuntimeError) as error:
        raise OwnCodeError(
            f"{source} returned values that are not arrays: {error}"
        ) from error
    return {"feature_names": np.array(columns), **arrays} if columns else arrays


def convert_inputs(rows: Any, dataset: Dataset) -> Tensor:
    """Convert a user's rows or images to inputs of the data set, (n, h, w, channels).

    The columns of a table are matched to the data set's features by name; without names
    on either side, and for arrays, by position.
    """
    source, spec = "the input", dataset.spec
    columns = list(getattr(rows, "columns", ()))
    if columns and dataset.feature_names:
        names = list(map(str, columns))
        order = order_by_name(names, dataset.feature_names, source)
        rows = rows[[columns[position] for position in order]]
    # NumPy would convert a table with columns of several types to objects.
    dtype = np.float64 if spec.dtype == "float32" else None
    try:
        array = np.asarray(rows, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{source} is not an array of numbers: {error}") from error
    return torch.from_numpy(fit_inputs(array, spec, source).copy())


def _is_input(key: str) -> bool:
    return ALIASES.get(key, key).endswith("inputs")


def _common_columns(returned: Mapping[Any, Any], source: str) -> list[str]:
    """Return the columns of inputs that are tables of pandas or polars, else none."""
    columns: list[list[Any]] = [
        list(getattr(value, "columns", ()))
        for key, value in returned.items()
        if _is_input(key)
    ]
    if not all(columns):
        return []
    if not all(isinstance(name, str) for names in columns for name in names):
        return []  # The columns 0, 1, ... of a table without names are positions.
    for other in columns[1:]:
        if set(other) != set(columns[0]):
            odd = sorted(set(other) ^ set(columns[0]))
            raise OwnCodeError(
                f"{source} returned tables with different columns, only some with "
                f"{odd[0]!r}; expected the same columns in the inputs of each split"
            )
    advice = "rename them to use them"
    return list(drop_index_columns(columns[0], frozenset(), source, advice))


@dataclass(frozen=True, kw_only=True)
class OwnDataSettings(Settings):
    """Settings of the split of arrays that a function returns without test data.

    Attributes
    ----------
    test_fraction, seed
        As in `NpzFileSettings`.
    """

    test_fraction: TestFraction = 0.2
    seed: NonNegativeInt = 0


OWN_DATA = Kind(
    "a function that returns a knnper.Dataset or a mapping of arrays, or a subclass of "
    "knnper.DataFormat",
    base=OwnDataSettings,
)
"""An experiment's own data function or format."""


def load_own(choice: Choice[Settings]) -> Dataset:
    """Call a user's function and build its data set; see `OWN_DATA`."""
    settings = choice.settings
    assert isinstance(settings, OwnDataSettings), "as `OWN_DATA` says"
    with explained():
        returned = choice.entry(**arguments(settings, OwnDataSettings))
    if isinstance(returned, Dataset):
        return returned
    known = (*KEYS, *CLIENT_KEYS)
    arrays = rename_aliases(_require_arrays(returned, choice.name, known), choice.name)
    return build_dataset(arrays, choice.name, settings.test_fraction, settings.seed)


def _collect_site_data(data: SiteData, source: str) -> CollectedExamples:
    """Convert split and labelled data to the form of a reader's result."""
    parts = list(data.splits())
    class_of = dict(enumerate(data.task.class_names))
    labels = [label for _, part in parts for label in part.examples.labels.tolist()]
    wrong = sorted(set(labels) - class_of.keys())
    if wrong:
        raise OwnCodeError(
            f"{source} returned the label {wrong[0]}, expected 0 to "
            f"{len(class_of) - 1}: a position in its task's class_names"
        )
    images = np.concatenate([part.examples.images.numpy() for _, part in parts])
    return CollectedExamples(
        source=source,
        names=tuple(name for _, part in parts for name in part.names),
        labels=tuple(class_of[label] for label in labels),
        inputs=ArrayInputs(source, images),
        splits=tuple(split for split, part in parts for _ in part.names),
        given_splits=frozenset(split for split, _ in parts),
        feature_names=data.task.feature_names,
    )
