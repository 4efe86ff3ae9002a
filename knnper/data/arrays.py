"""Data sets and site data in .npz files."""

import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.cache import (
    CentralSplit,
    DatasetContents,
    EntryWriter,
    Source,
    cached_dataset,
    state_of_files,
)
from knnper.data.dividing import (
    SPLITS,
    Split,
    clean_names,
    mark_by_group,
    numbered,
    require_known,
    sorted_values,
    warn_of_joined,
    warn_of_merged,
)
from knnper.data.examples import DataFormat, Dataset, InputSpec, LabelledArrays
from knnper.data.features import (
    clean_features,
    default_feature_names,
    warn_of_coarse,
    warn_of_row_numbers,
)
from knnper.data.normalization import statistics_of
from knnper.data.numpy_files import load_arrays
from knnper.data.site_data import CollectedExamples, SiteSettings, place_of, split_texts
from knnper.data.site_inputs import ArrayInputs, fit_inputs
from knnper.data.site_task import SiteTask
from knnper.data.split_names import SPLIT_WORDS, mentions_split
from knnper.errors import DataError, warn_once
from knnper.reasons import Code, SafeReason
from knnper.settings import NonNegativeInt

_LOG = logging.getLogger(__name__)
Arrays = Mapping[str, NDArray[Any]]
TestFraction = Annotated[float, Field(gt=0, lt=1)]
WHOLE = ("inputs", "labels", "names", "split")
PER_SPLIT = tuple(f"{split}_{part}" for split in SPLITS for part in WHOLE[:3])
KEYS = (*WHOLE, *PER_SPLIT, "class_names", "feature_names")
# Common names of the same arrays: x and y, X_train and y_train, clients_test.
_LETTERS = {"x": "inputs", "X": "inputs", "y": "labels", "Y": "labels"}
_PARTS = {**_LETTERS, **{part: part for part in (*WHOLE[:3], "clients")}}
ALIASES = {
    name: f"{split}_{part}"
    for called, part in _PARTS.items()
    for word, split in SPLIT_WORDS.items()
    for name in (f"{called}_{word}", f"{word}_{called}")
    if name != f"{split}_{part}"
} | _LETTERS
_LAYOUT = (
    "expected inputs and labels (or x and y), or train_inputs and train_labels (or "
    "x_train and y_train) and the same of validation and test"
)


CLIENT_KEYS = ("clients", *(f"{split}_clients" for split in SPLITS))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Load the arrays of an .npz file, under the names of `collect_arrays`."""
    if not path.is_file():
        raise DataError(
            f"{path}: the file does not exist; give the path of an .npz file",
            reason=SafeReason(Code.MISSING_FILE),
        )
    known = (*KEYS, *CLIENT_KEYS, *ALIASES)
    arrays = rename_aliases(load_arrays(path, known), str(path))
    with zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
    unread = sorted(filter(mentions_split, names.difference(known)))
    if unread:
        warn_once(
            _LOG,
            f"{path}: the arrays {', '.join(unread)} are not read; call splits train, "
            "validation and test",
        )
    return arrays


def rename_aliases(named: Arrays, source: str) -> dict[str, NDArray[Any]]:
    """Rename arrays from common names to the names of `collect_arrays`."""
    arrays = {name: named[name] for name in named if name not in ALIASES}
    for name in named.keys() - arrays.keys():
        if ALIASES[name] in arrays:
            raise DataError(
                f"{source}: found the arrays {name} and {ALIASES[name]}, which mean "
                "the same; leave out one of them",
                reason=SafeReason(Code.WRONG_LAYOUT),
            )
        arrays[ALIASES[name]] = named[name]
    return arrays


def collect_arrays(arrays: Arrays, source: str) -> CollectedExamples:
    """Collect the examples in ``arrays``; ``source`` is their name in errors.

    There are two layouts: ``inputs`` (n, ...) and ``labels`` (n,), optionally ``names``
    (n,) and ``split`` (n,) with the texts train, validation and test; or
    ``train_inputs``, ``train_labels``, optionally ``train_names``, and the same for
    validation and test. Labels are names of classes, or whole numbers: positions in
    ``class_names`` if that is given. ``feature_names`` (d,) name the features of
    inputs (n, d).
    """
    given_splits = _find_given_splits(arrays, source)
    prefixes = [f"{split}_" for split in given_splits] or [""]
    parts = [_extract_split(arrays, prefix, source) for prefix in prefixes]
    if len({(inputs.shape[1:], inputs.dtype) for inputs, *_ in parts}) > 1:
        forms = ", ".join(f"{inputs.dtype} {inputs.shape}" for inputs, *_ in parts)
        raise DataError(
            f"{source}: the inputs of the splits differ in form ({forms}); expected "
            "the same type, and the same shape except for n",
            reason=SafeReason(Code.WRONG_SHAPE),
        )
    inputs, labels = parts[0][:2]
    if len(parts) > 1:
        inputs, labels = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    splits: tuple[Split, ...] | None = None
    if given_splits:
        splits = tuple(
            np.repeat(given_splits, [len(names) for *_, names in parts]).tolist()
        )
    elif "split" in arrays:
        splits = split_texts(
            _extract_texts(arrays, "split", len(inputs), source), source
        )
    texts, numbered = _label_texts(labels, arrays.get("class_names"), source)
    return CollectedExamples(
        source=source,
        names=tuple(name for *_, names in parts for name in names),
        labels=texts,
        inputs=ArrayInputs(source, inputs),
        splits=splits,
        given_splits=frozenset(given_splits or splits or ()),
        numbered=numbered,
        feature_names=_feature_names(arrays, inputs, source),
    )


def _feature_names(
    arrays: Arrays, inputs: NDArray[Any], source: str
) -> tuple[str, ...]:
    """Return the names of the features of inputs (n, d); empty if not given."""
    names = arrays.get("feature_names")
    if names is None:
        return ()
    texts = clean_features([str(name) for name in names.ravel().tolist()])
    num_values = inputs[:1].size if len(inputs) else len(texts)
    if len(set(texts)) < len(texts) or len(texts) != num_values:
        raise DataError(
            f"{source}: found {len(texts)} feature_names ({len(set(texts))} "
            f"distinct), expected one for each of the {num_values} values of an input",
            reason=SafeReason(Code.WRONG_LAYOUT),
        )
    return texts


def _find_given_splits(arrays: Arrays, source: str) -> list[Split]:
    """Return the splits with arrays of their own; empty if all are in one array."""
    if not any(key in arrays for key in PER_SPLIT):
        return []
    if any(key in arrays for key in WHOLE) or "train_inputs" not in arrays:
        names = ", ".join(sorted(arrays))
        raise DataError(
            f"{source}: found the arrays {names}; {_LAYOUT}",
            reason=SafeReason(Code.WRONG_LAYOUT),
        )
    return [
        split
        for split in SPLITS
        if f"{split}_inputs" in arrays or f"{split}_labels" in arrays
    ]


def _extract_split(
    arrays: Arrays, prefix: str, source: str
) -> tuple[NDArray[Any], NDArray[Any], tuple[str, ...]]:
    """Return the inputs, labels and names of the split with this prefix."""
    for part in ("inputs", "labels"):
        if f"{prefix}{part}" not in arrays:
            raise DataError(
                f"{source}: found no array {prefix}{part}; {_LAYOUT}",
                reason=SafeReason(Code.WRONG_LAYOUT),
            )
    inputs, labels = arrays[f"{prefix}inputs"], arrays[f"{prefix}labels"]
    if labels.ndim == 2 and labels.shape[1] == 1:  # Keras ships CIFAR's labels so
        labels = labels[:, 0]
    if inputs.ndim < 2 or labels.shape != inputs.shape[:1]:
        raise DataError(
            f"{source}: found {prefix}inputs of shape {inputs.shape} and "
            f"{prefix}labels of shape {labels.shape}; expected (n, ...) and (n,)",
            reason=SafeReason(Code.WRONG_SHAPE),
        )
    if f"{prefix}names" in arrays:
        return (
            inputs,
            labels,
            _extract_texts(arrays, f"{prefix}names", len(inputs), source),
        )
    folder = prefix.replace("_", "/")
    return inputs, labels, tuple(f"{folder}{row:05d}" for row in range(len(inputs)))


def _label_texts(
    labels: NDArray[Any], class_names: NDArray[Any] | None, source: str
) -> tuple[tuple[str, ...], bool]:
    """Return the labels as texts, and whether they are numbers without class names."""
    if labels.dtype.kind == "U":
        return tuple(labels.tolist()), False
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{source}: found labels of {labels.dtype}, expected whole numbers, or the "
            "names of classes as texts",
            reason=SafeReason(Code.WRONG_SHAPE),
        )
    if class_names is None or not class_names.size:
        return tuple(map(str, labels.tolist())), True
    names = [str(name) for name in class_names.ravel()]
    if labels.size and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            f"{source}: labels: expected values in [0, {len(names)}), the positions in "
            f"its class_names, found {labels.min()} to {labels.max()}",
            reason=SafeReason(Code.WRONG_LAYOUT),
        )
    return tuple(names[label] for label in labels.tolist()), False


def _extract_texts(
    arrays: Arrays, key: str, num_rows: int, source: str
) -> tuple[str, ...]:
    array = arrays[key]
    if array.dtype.kind not in "Uiu" or array.shape != (num_rows,):
        raise DataError(
            f"{source}: {key}: expected texts of shape ({num_rows},), found "
            f"{array.dtype} of shape {array.shape}",
            reason=SafeReason(Code.WRONG_SHAPE),
        )
    return tuple(str(value) for value in array.tolist())


@dataclass(frozen=True)
class NpzSettings(SiteSettings):
    """Settings of an .npz file.

    Attributes
    ----------
    path
        A file with the arrays ``inputs`` and ``labels``, or ``train_inputs``,
        ``train_labels`` and so on; see `collect_arrays`.
    """

    name = "npz"
    title = "NPZ file"
    summary = "arrays inputs and labels, or train_inputs, train_labels, ..."

    path: str

    def collect(self, base: Path, task: SiteTask | None) -> CollectedExamples:  # noqa: ARG002
        """Collect the examples of the file."""
        path = place_of(base, self.path)
        return collect_arrays(read_arrays(path), str(path))


@dataclass(frozen=True, kw_only=True)
class NpzFileSettings(DataFormat):
    """Settings of an .npz file.

    Attributes
    ----------
    path
        An .npz file with ``x`` (n, ...) and ``y`` (n,), or ``x_train``, ``y_train``,
        ``x_test`` and ``y_test``. For the partition ``natural``, ``clients`` (n,), or
        ``clients_train`` and ``clients_test``, hold the client of each input. If labels
        are positions, ``class_names`` holds the names. The names of a site's arrays are
        accepted, too, and ``val`` or ``dev`` for ``validation``.
    test_fraction
        Fraction of test inputs if the file has no test split, (0, 1), rounded: of each
        class, or of each client. At least one of each is left for training.
    seed
        Seed of the choice of test inputs.
    """

    name = "npz"
    title = "NPZ file"
    summary = "your own arrays: x and y, or x_train, y_train, x_test, y_test"

    path: str
    test_fraction: TestFraction = 0.2
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Load the file: uint8 as images, other numbers as features.

        Validation data is added to the training data, since each client holds out
        validation data of its own.
        """
        path = Path(self.path).expanduser().absolute()
        source: Source = {
            "file": state_of_files([path], path.parent),
            "test_fraction": self.test_fraction,
            "seed": self.seed,
        }
        return cached_dataset(
            self.name, source, lambda writer: self._write(writer, path)
        )

    def _write(self, writer: EntryWriter, path: Path) -> DatasetContents:
        arrays = read_arrays(path)
        dataset = build_dataset(arrays, str(path), self.test_fraction, self.seed)
        splits: tuple[tuple[CentralSplit, LabelledArrays], ...] = (
            ("train", dataset.train),
            ("test", dataset.test),
        )
        for split, part in splits:
            writer.put_images(split, part.images)
            writer.put_labels(split, part.labels)
            if part.client_ids is not None:
                writer.put_client_ids(split, part.client_ids)
        return DatasetContents(
            dataset.class_names,
            dtype=dataset.spec.dtype,
            client_names=dataset.client_names,
            feature_names=dataset.feature_names,
        )


def build_dataset(arrays: Arrays, source: str, fraction: float, seed: int) -> Dataset:
    """Build a data set of arrays; without a test split, choose test inputs.

    The arrays are those of `collect_arrays`, and optionally the client of each input:
    ``clients`` (n,), or ``train_clients`` and ``test_clients``.
    """
    collected = collect_arrays(arrays, source)
    clients = _extract_clients(arrays, len(collected.names), source)
    warn_of_merged(collected.labels, "labels", source)
    collected = replace(collected, labels=clean_names(collected.labels))
    if "validation" in collected.given_splits:
        warn_of_joined(source, ("validation",))
    if "test" in collected.given_splits:
        marks = [split == "test" for split in collected.splits or ()]
    else:
        groups = collected.labels if clients is None else clients
        marks = mark_by_group(groups, collected.names, collected.labels, fraction, seed)
    is_test = np.array(marks, dtype=bool)
    labels = np.array(collected.labels, dtype=object)
    clean_classes = clean_names(
        str(name) for name in arrays.get("class_names", np.empty(0))
    )
    class_names = tuple(dict.fromkeys(clean_classes)) or sorted_values(labels[~is_test])
    require_known(labels[is_test], class_names, source)
    shape, dtype = collected.inputs.form()
    spec = InputSpec(
        shape,
        len(class_names),
        mean=(0.0,) * shape[2],
        std=(1.0,) * shape[2],
        dtype=dtype,
    )
    assert isinstance(collected.inputs, ArrayInputs), "of arrays"
    if collected.inputs.array.ndim == 4 and shape[0] in (1, 3) and shape[2] > 4:
        raise DataError(
            f"{source}: found inputs of shape {collected.inputs.array.shape}, which "
            "seem to have the channels first; expected (n, height, width, channels): "
            "convert them with numpy.moveaxis(x, 1, -1)"
        )
    inputs = fit_inputs(collected.inputs.array, spec, source)
    _warn_of_features(collected.inputs, ~is_test, collected.feature_names)
    client_names = sorted_values(clients or ())

    def part(chosen: NDArray[np.bool_]) -> LabelledArrays:
        if not chosen.any():
            raise DataError(
                f"{source}: found no training data or no test data; raise "
                "data.test_fraction, or give more data"
            )
        owners = None
        if clients is not None:
            owners = numbered(np.array(clients, dtype=object)[chosen], client_names)
        return LabelledArrays(
            inputs[chosen], numbered(labels[chosen], class_names), owners
        )

    train = part(~is_test)
    mean, std = statistics_of(train.images)
    return Dataset(
        name=source,
        train=train,
        test=part(is_test),
        spec=replace(spec, mean=mean, std=std),
        class_names=class_names,
        feature_names=collected.feature_names,
        client_names=client_names,
    )


def _extract_clients(arrays: Arrays, count: int, source: str) -> tuple[str, ...] | None:
    """Return the client of each input in the order of `collect_arrays`, or None."""
    keys = [f"{split}_clients" for split in _find_given_splits(arrays, source)] or [
        "clients"
    ]
    if not any(key in arrays for key in CLIENT_KEYS):
        return None
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise DataError(
            f"{source}: found clients of some splits, but no array {missing[0]}; "
            "expected the client of every input, or no clients"
        )
    joined = {"clients": np.concatenate([arrays[key].ravel() for key in keys])}
    clients = _extract_texts(joined, "clients", count, source)
    warn_of_merged(clients, "clients", source)
    return clean_names(clients)


def _warn_of_features(
    inputs: ArrayInputs, is_train: NDArray[np.bool_], names: Sequence[str]
) -> None:
    """Log features (n, d) that count the rows, or need more precision than float32."""
    if inputs.array.ndim != 2 or inputs.array.dtype == np.uint8:
        return
    names = names or default_feature_names(inputs.array.shape[1])
    warn_of_coarse(inputs.array[is_train], names, inputs.source)
    warn_of_row_numbers(inputs.array, names, inputs.source)
