"""Data as arrays: in an .npz file, or from a function of a site's own."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.cache import (
    Contents,
    EntryWriter,
    Source,
    cached_dataset,
    load_arrays,
    state_of_files,
)
from knnper.data.cache import Split as CentralSplit
from knnper.data.dividing import (
    SPLITS,
    Split,
    mark_by_group,
    numbered,
    require_known,
    values_in_order,
)
from knnper.data.examples import DataFormat, Dataset, InputSpec
from knnper.data.site_data import (
    ArrayInputs,
    Collected,
    SiteData,
    SiteSettings,
    SiteTask,
    fit_inputs,
    place_of,
    split_texts,
)
from knnper.errors import DataError, KnnPerError
from knnper.experiment import NonNegativeInt, alternatives

Arrays = Mapping[str, NDArray[Any]]
WHOLE = ("inputs", "labels", "names", "split")
PER_SPLIT = tuple(f"{one}_{what}" for one in SPLITS for what in WHOLE[:3])


KEYS = (*WHOLE, *PER_SPLIT, "class_names")
_CLIENTS = ("clients", *(f"{one}_clients" for one in SPLITS))

# As others call them: x and y, X_train and y_train, clients_test.
_LETTERS = {"x": "inputs", "X": "inputs", "y": "labels"}
_ALIASES = {
    **_LETTERS,
    **{f"{one}_{of}": f"{of}_{_LETTERS[one]}" for one in _LETTERS for of in SPLITS},
    **{f"clients_{of}": f"{of}_clients" for of in SPLITS},
}


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file by their names in `collect_arrays`."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; give that of an .npz file")
    found = load_arrays(path, (*KEYS, *_CLIENTS, *_ALIASES))
    arrays = {name: found[name] for name in found if name not in _ALIASES}
    for name in found.keys() - arrays.keys():
        if _ALIASES[name] in arrays:
            raise DataError(
                f"{path}: found the array {name} and another that means the same, "
                f"{_ALIASES[name]}; leave out one of the two"
            )
        arrays[_ALIASES[name]] = found[name]
    return arrays


_LAYOUT = (
    "expected inputs and labels (or x and y), or train_inputs and train_labels (or "
    "x_train and y_train) and the same of validation and test"
)


def collect_arrays(arrays: Arrays, source: str) -> Collected:
    """Return the examples in ``arrays``; ``source`` is named in errors.

    Either ``inputs`` (n, ...) and ``labels`` (n,), optionally ``names`` (n,) and
    ``split`` (n,) with the texts train, validation and test; or ``train_inputs``,
    ``train_labels``, optionally ``train_names``, and the same of validation and test.
    Labels are names of classes, or whole numbers: positions in ``class_names``, where
    this is there.
    """
    given = _given(arrays, source)
    prefixes = [f"{split}_" for split in given] or [""]
    parts = [_part(arrays, prefix, source) for prefix in prefixes]
    if len({(inputs.shape[1:], inputs.dtype) for inputs, *_ in parts}) > 1:
        found = ", ".join(f"{inputs.dtype} {inputs.shape}" for inputs, *_ in parts)
        raise DataError(
            f"{source}: the inputs of the splits differ in form ({found}); expected "
            "the same shape but for the number, and the same type"
        )
    inputs, labels = parts[0][:2]
    if len(parts) > 1:
        inputs, labels = (np.concatenate([one[at] for one in parts]) for at in (0, 1))
    splits: tuple[Split, ...] | None = None
    if given:
        splits = tuple(np.repeat(given, [len(names) for *_, names in parts]).tolist())
    elif "split" in arrays:
        splits = split_texts(_texts(arrays, "split", len(inputs), source), source)
    texts, numbered = _label_texts(labels, arrays.get("class_names"), source)
    return Collected(
        source=source,
        names=tuple(name for *_, names in parts for name in names),
        labels=texts,
        inputs=ArrayInputs(source, inputs),
        splits=splits,
        given_splits=frozenset(given or splits or ()),
        numbered=numbered,
    )


def _given(arrays: Arrays, source: str) -> list[Split]:
    """Return the splits that come apart, train among them; none where none does."""
    if not any(key in arrays for key in PER_SPLIT):
        return []
    if any(key in arrays for key in WHOLE) or "train_inputs" not in arrays:
        found = ", ".join(sorted(arrays))
        raise DataError(f"{source}: found the arrays {found}; {_LAYOUT}")
    return [
        split
        for split in SPLITS
        if f"{split}_inputs" in arrays or f"{split}_labels" in arrays
    ]


def _part(
    arrays: Arrays, prefix: str, source: str
) -> tuple[NDArray[Any], NDArray[Any], tuple[str, ...]]:
    """Return inputs, and one label and one name for each of them."""
    for what in ("inputs", "labels"):
        if f"{prefix}{what}" not in arrays:
            raise DataError(f"{source}: found no array {prefix}{what}; {_LAYOUT}")
    inputs, labels = arrays[f"{prefix}inputs"], arrays[f"{prefix}labels"]
    if labels.ndim == 2 and labels.shape[1] == 1:  # as Keras has CIFAR's
        labels = labels[:, 0]
    if inputs.ndim < 2 or labels.shape != inputs.shape[:1]:
        raise DataError(
            f"{source}: found {prefix}inputs of shape {inputs.shape} and "
            f"{prefix}labels of shape {labels.shape}; expected (n, ...) and (n,)"
        )
    if f"{prefix}names" in arrays:
        return inputs, labels, _texts(arrays, f"{prefix}names", len(inputs), source)
    folder = prefix.replace("_", "/")
    return inputs, labels, tuple(f"{folder}{row:05d}" for row in range(len(inputs)))


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


def _texts(arrays: Arrays, key: str, num_rows: int, source: str) -> tuple[str, ...]:
    array = arrays[key]
    if array.dtype.kind not in "Uiu" or array.shape != (num_rows,):
        raise DataError(
            f"{source}: {key}: expected texts of shape ({num_rows},), found "
            f"{array.dtype} of shape {array.shape}"
        )
    return tuple(str(one) for one in array.tolist())


@dataclass(frozen=True)
class NpzSettings(SiteSettings):
    """Where the file is.

    Attributes
    ----------
    path
        A file with the arrays that `collect_arrays` describes: ``inputs`` and
        ``labels``, or ``train_inputs``, ``train_labels`` and so on.
    """

    name = "npz"
    title = "NPZ file"
    summary = "arrays inputs and labels, or train_inputs, train_labels, ..."

    path: str

    def collect(self, base: Path, task: SiteTask | None) -> Collected:  # noqa: ARG002
        """Return the examples in an .npz file."""
        path = place_of(base, self.path)
        return collect_arrays(read_arrays(path), str(path))


@dataclass(frozen=True, kw_only=True)
class NpzFileSettings(DataFormat):
    """Where the file is.

    Attributes
    ----------
    path
        An .npz file with ``x`` (n, ...) and ``y`` (n,), or ``x_train``, ``y_train``,
        ``x_test`` and ``y_test``; with ``clients`` (n,), or ``clients_train`` and
        ``clients_test``, who each input belongs to, where the partition is ``natural``;
        and with ``class_names``, where labels are positions in it. The names of arrays
        that sites have do, too.
    test_fraction
        Part of the inputs that is tested on where there is no test split, (0, 1): of
        each class, or of each client, rounded. One of each is left to train on.
    seed
        Of the choice of these.
    """

    name = "npz"
    title = "NPZ file"
    summary = "your own arrays: x and y, or x_train, y_train, x_test, y_test"

    path: str
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Return what uint8 (images) or other numbers the file holds.

        Validation data is added to the training data: the partition holds out its own.
        """
        path = Path(self.path).expanduser().absolute()
        source: Source = {
            "file": state_of_files([path], path.parent),
            "test_fraction": self.test_fraction,
            "seed": self.seed,
        }
        return cached_dataset(self.name, source, lambda one: self._write(one, path))

    def _write(self, writer: EntryWriter, path: Path) -> Contents:
        arrays = read_arrays(path)
        found = collect_arrays(arrays, str(path))
        clients = _clients(arrays, len(found.names), str(path))
        if "test" in found.given_splits:
            is_test = np.array([split == "test" for split in found.splits or ()])
        else:
            groups = found.labels if clients is None else clients
            marks = mark_by_group(
                groups, found.names, found.labels, self.test_fraction, self.seed
            )
            is_test = np.array(marks)
        labels = np.array(found.labels, dtype=object)
        given = tuple(str(name) for name in arrays.get("class_names", np.empty(0)))
        class_names = given or values_in_order(labels[~is_test])
        require_known(labels[is_test], class_names, str(path))
        shape, dtype = found.inputs.form()
        one = (0.0,) * shape[2], (1.0,) * shape[2]
        spec = InputSpec(shape, len(class_names), *one, dtype)
        assert isinstance(found.inputs, ArrayInputs), "of arrays"
        inputs = fit_inputs(found.inputs.array, spec, str(path))
        names = values_in_order(clients or ())
        parts: dict[CentralSplit, NDArray[np.bool_]] = {
            "train": ~is_test,
            "test": is_test,
        }
        for split, chosen in parts.items():
            writer.put_images(split, inputs[chosen])
            writer.put_labels(split, numbered(labels[chosen], class_names))
            if clients is not None:
                owners = np.array(clients, dtype=object)[chosen]
                writer.put_client_ids(split, numbered(owners, names))
        return Contents(class_names, dtype=dtype, client_names=names)


def _clients(arrays: Arrays, count: int, source: str) -> tuple[str, ...] | None:
    """Return whose each input is, in the order of `collect_arrays`, if it is said."""
    keys = [f"{one}_clients" for one in _given(arrays, source)] or ["clients"]
    if not any(key in arrays for key in _CLIENTS):
        return None
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise DataError(
            f"{source}: found clients of some splits, but no array {missing[0]}; "
            "expected the client of each input, or of none"
        )
    joined = {"clients": np.concatenate([arrays[key].ravel() for key in keys])}
    return _texts(joined, "clients", count, source)


_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


@dataclass(frozen=True)
class PythonSettings(SiteSettings):
    """Which function is called, and with what.

    Attributes
    ----------
    entry
        ``module:function``. The module is looked for beside the client's file first,
        then among the installed ones.
    arguments
        Passed by name, after the folder that relative paths are relative to (a
        `pathlib.Path`) and the task (`SiteTask`, or None where none is known yet).
    """

    name = "python"
    title = "Python function"
    summary = "your own code: module:function, beside the client's file or installed"

    entry: Annotated[str, Field(pattern=rf"^{_MODULE}:[A-Za-z_]\w*$")]
    arguments: dict[str, Any] = field(default_factory=dict)

    def collect(self, base: Path, task: SiteTask | None) -> Collected:
        """Return what a function gives: `SiteData`, or a mapping of arrays."""
        source = f"data.entry {self.entry}"
        module_name, _, name = self.entry.partition(":")
        with _importable(base, module_name), _owners_code(base, source):
            module = _module(module_name, base)
            function = getattr(module, name, None)
            if not callable(function):
                known = [one for one, value in vars(module).items() if callable(value)]
                raise DataError(
                    f"{source}: {module.__file__} has no function {name!r}; "
                    f"{alternatives(name, known)}"
                )
            returned = function(base, task, **self.arguments)
        with _owners_code(base, source):
            if isinstance(returned, SiteData):
                return _of_site_data(returned, source)
            if not isinstance(returned, Mapping):
                raise DataError(
                    f"{source} returned {type(returned).__name__}, expected SiteData "
                    "or a mapping of arrays such as inputs and labels"
                )
            for key in returned:
                if key not in KEYS:
                    raise DataError(
                        f"{source} returned an array {key!r}; "
                        f"{alternatives(str(key), KEYS)}"
                    )
            arrays = {key: np.asarray(value) for key, value in returned.items()}
        return collect_arrays(arrays, source)


def _module(name: str, base: Path) -> ModuleType:
    """Return the module beside the client's file as it is now, or an installed one."""
    place = base.joinpath(*name.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return _fresh(name, file)
    return importlib.import_module(name)


class _AsItIsNow(SourceFileLoader):
    """Compiles the file each time: kept bytecode is told from it by whole seconds."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of what the file holds."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _fresh(name: str, file: Path) -> ModuleType:
    loader = _AsItIsNow(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "as above"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module there while it is being executed.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _importable(base: Path, name: str) -> Iterator[None]:
    """Let modules in ``base`` import each other inside the block."""
    before = sys.modules.get(name)
    sys.path.insert(0, str(base))
    try:
        yield
    finally:
        sys.path.remove(str(base))
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


@contextlib.contextmanager
def _owners_code(base: Path, source: str) -> Iterator[None]:
    """Make errors of the owner's code ours, with their place."""
    try:
        yield
    except KnnPerError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if Path(one.filename).is_relative_to(base)]
        frame = (own or frames)[-1]
        raise DataError(
            f"{source} failed with {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno}); mend the function, or its "
            "data.arguments"
        ) from error


def _of_site_data(data: SiteData, source: str) -> Collected:
    """Return data that is split and labelled as what a reader found."""
    parts = list(data.splits())
    class_of = dict(enumerate(data.task.class_names))
    labels = [label for _, one in parts for label in one.examples.labels.tolist()]
    images = np.concatenate([one.examples.images.numpy() for _, one in parts])
    return Collected(
        source=source,
        names=tuple(name for _, one in parts for name in one.names),
        labels=tuple(class_of[label] for label in labels),
        inputs=ArrayInputs(source, images),
        splits=tuple(split for split, one in parts for _ in one.names),
        given_splits=frozenset(split for split, _ in parts),
    )
