"""Columns of a table as labelled inputs: rows of features, images, texts."""

import logging
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.cache import (
    Contents,
    EntryWriter,
    Split,
    cached_dataset,
    hub_folder,
    state_of_files,
)
from knnper.data.dividing import (
    DividingSettings,
    FractionSettings,
    mark_by_group,
    mark_tested,
    numbered,
    require_known,
    split_by_name,
    values_in_order,
)
from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.data.images import DecodedSettings, Encoded, Picture
from knnper.data.tokens import open_tokenizer
from knnper.errors import DataError
from knnper.experiment import (
    NonNegativeInt,
    PositiveInt,
    ProperFraction,
    alternatives,
)
from knnper.process import import_extra
from knnper.reasons import Code, SafeReason

_LOG = logging.getLogger(__name__)

# What pandas and NumPy write where a number is missing.
_NOT_A_NUMBER = ("nan", "NaN")

_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS = ("integer", "floating", "boolean", "decimal", "null")

# Of float32, relative to a value; fewer of them in a deviation are too coarse.
_STEP = 2.0**-23

_FEWEST_STEPS = 100


@dataclass(frozen=True, eq=False)
class TableFile:
    """Some columns of a table, in memory."""

    path: Path
    texts: dict[str, tuple[str, ...]]  # an empty one where there is none
    number_columns: tuple[str, ...]
    feature_names: tuple[str, ...]  # the same, but for columns of lists of numbers
    numbers: NDArray[np.float64]
    raw: Mapping[str, Any] = field(default_factory=dict)  # Arrow's columns
    class_names: tuple[str, ...] = ()  # of the labels, where the table says it

    def filled_texts(self, column: str) -> tuple[str, ...]:
        """Return the texts of a column, none of which is empty or ``nan``."""
        texts = self.texts[column]
        missing = ("", *_NOT_A_NUMBER)
        rows = [row for row, text in enumerate(texts, 1) if text in missing]
        if rows:
            found = texts[rows[0] - 1] or "nothing"
            raise DataError(
                f"{self.path}: {len(rows)} rows hold {found} in the column {column!r}, "
                f"the first of them is row {rows[0]}, counting from 1; fill them in, "
                "or leave the rows out",
                reason=SafeReason(Code.MISSING_VALUE, count=len(rows), row=rows[0]),
            )
        return texts

    def row_names(self) -> tuple[str, ...]:
        """Return what rows without a name are called: their number, as in ``00012``."""
        return tuple(f"{row:05d}" for row in range(len(self.numbers)))


@dataclass(frozen=True)
class Wanted:
    """Which columns are read, and as what."""

    texts: tuple[str, ...]
    numbers: tuple[str, ...] | None = None  # None: all that are not wanted otherwise
    raw: tuple[str, ...] = ()  # as they are, such as files' contents

    @classmethod
    def of(
        cls,
        texts: Sequence[str | None],
        numbers: Sequence[str] | None,
        raw: str | None = None,
    ) -> "Wanted":
        """Return what is wanted, of which nothing is named by None."""
        named = tuple(dict.fromkeys(name for name in texts if name is not None))
        chosen = None if numbers is None else tuple(numbers)
        return cls(named, chosen, () if raw is None else (raw,))

    @property
    def as_they_are(self) -> tuple[str, ...]:
        """The columns that are no features."""
        return (*self.texts, *self.raw)


def arrow(module: str) -> Any:
    """Return a module of pyarrow."""
    return import_extra(f"pyarrow.{module}", "tables", "reading tables")


def columns_of(
    table: Any, wanted: Wanted, numbers: tuple[str, ...], path: Path
) -> TableFile:
    """Return the wanted columns of Arrow's ``table``; see `number_columns`."""
    found = {name: _texts(table, name) for name in wanted.texts}
    raw = {name: table.column(name) for name in wanted.raw}
    parts = [_scalars(table.column(name), name, path) for name in numbers]
    columns = {name: column for part in parts for name, column in part.items()}
    values = _numbers(columns, table.num_rows, path)
    return TableFile(path, found, numbers, tuple(columns), values, raw)


def number_columns(schema: Any, wanted: Wanted, path: Path) -> tuple[str, ...]:
    """Return the columns of features; refuse what is not there, or no number."""
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise DataError(
            f"{path} has more than one column {twice[0]!r}; rename one",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    rest = (name for name in schema.names if name not in wanted.as_they_are)
    numbers = tuple(rest) if wanted.numbers is None else wanted.numbers
    for name, count in Counter((*wanted.as_they_are, *numbers)).items():
        if name not in schema.names:
            known = alternatives(name, schema.names)
            raise DataError(
                f"{path} has no column {name!r}; {known}",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )
        if count > 1:
            raise DataError(
                f"{path}: found the column {name!r} more than once among the features, "
                "or as a feature that has another meaning too, such as the label; take "
                "it out of data.features",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )
    if not numbers and wanted.numbers is None:
        raise DataError(
            f"{path} has no columns of features; expected at least one",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    is_a = [getattr(arrow("types"), f"is_{kind}") for kind in _NUMBERS]
    types = {name: schema.field(name).type for name in numbers}
    other = [
        f"{name} ({kind})"
        for name, kind in types.items()
        if not any(check(kind.value_type if _is_list(kind) else kind) for check in is_a)
    ]
    if other:
        raise DataError(
            f"{path}: features must be numbers, found the columns {', '.join(other)}; "
            "list the columns to use (data.features), turn these into numbers, or say "
            "that they hold images or texts (data.image, data.text)",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    return numbers


def _is_list(kind: Any) -> bool:
    types = arrow("types")
    return any(
        check(kind)
        for check in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    )


def _scalars(column: Any, name: str, path: Path) -> dict[str, Any]:
    """Return a column of numbers, or of each place in its lists, by name."""
    if not _is_list(column.type):
        return {name: column}
    lengths = set(arrow("compute").list_value_length(column).to_pylist())
    if len(lengths) != 1 or not (length := lengths.pop()):
        raise DataError(
            f"{path}: found lists of different lengths, or none, in the column "
            f"{name!r}; features must be as many in each row",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    flat = arrow("compute").list_flatten(column).to_numpy().reshape(-1, length)
    make = arrow("lib").array
    return {f"{name}[{at}]": make(flat[:, at]) for at in range(length)}


def _texts(table: Any, name: str) -> tuple[str, ...]:
    column = table.column(name)
    is_real = arrow("types").is_floating(column.type)
    # Where numbers are expected, this one is what Parquet has in place of none.
    missing = (None, "nan") if is_real else (None,)
    texts = column.cast(arrow("lib").string()).to_pylist()
    return tuple("" if text in missing else text for text in texts)


def _numbers(
    columns: Mapping[str, Any], num_rows: int, path: Path
) -> NDArray[np.float64]:
    numbers = np.empty((num_rows, len(columns)), dtype=np.float64)
    lib = arrow("lib")
    for place, (name, column) in enumerate(columns.items()):
        try:
            # Safe, whole numbers above 2**53 would be refused; here they are rounded.
            numbers[:, place] = column.cast(lib.float64(), safe=False).to_numpy()
        except lib.ArrowException as error:
            # Its type was guessed from its beginning.
            found = _first_that_is_none(column) or f"what is no number ({error})"
            raise DataError(
                f"{path}: features must be numbers, found {found} in the column "
                f"{name!r}; correct it, leave the row out, or list other columns "
                "(data.features)",
                reason=SafeReason(Code.NOT_A_NUMBER, feature=place + 1),
            ) from error
    # So written, it is true of NaN as well.
    unfit = (~(np.abs(numbers) <= _LARGEST)).sum(axis=0)
    if unfit.any():
        pairs = zip(columns, unfit, strict=True)
        found = ", ".join(f"{name} {count}" for name, count in pairs if count)
        raise DataError(
            f"{path}: values are missing, not finite or too large for float32, in "
            f"{int((unfit > 0).sum())} columns ({found}); fill them in, leave the rows "
            "out, or list other columns (data.features)",
            reason=SafeReason(Code.VALUE_NOT_ALLOWED, count=int(unfit.sum())),
        )
    return numbers


def _first_that_is_none(column: Any) -> str | None:
    """Return the first value that is no number, and its row, in words."""
    missing = {None, *arrow("csv").ConvertOptions().null_values}
    for row, value in enumerate(column.to_pylist(), 1):
        try:
            float("0" if value in missing else value)
        except (TypeError, ValueError):
            return f"{value!r} in row {row}, counting from 1,"
    return None


def require_one_kind(settings: Any) -> None:
    """Refuse columns of several kinds of inputs, and texts without a tokenizer."""
    kinds = ("features", "image", "text")
    given = [kind for kind in kinds if getattr(settings, kind) is not None]
    if len(given) > 1:
        raise ValueError(
            f"found {' and '.join(given)}, expected one of them: inputs are of one kind"
        )
    text, tokenizer = settings.text, settings.tokenizer
    if (text is None) != (tokenizer is None):
        raise ValueError(
            f"found the text {text!r} with the tokenizer {tokenizer!r}, expected both "
            "or none of them"
        )


@dataclass(frozen=True, kw_only=True)
class ColumnSettings(DecodedSettings):
    """What the columns mean.

    Attributes
    ----------
    label
        The column of labels.
    features
        The columns of features, numbers or lists of as many in each row; null is all
        other columns, where there is no `image` and no `text`.
    image
        The column of images: paths of files, or files' contents.
    text
        The column of texts, which are classified as a whole.
    tokenizer
        What makes ids of the texts: the folder of a tokenizer of transformers, or a
        name on the Hugging Face Hub.
    max_tokens
        T, the ids of a text: longer ones are cut off.
    download
        Whether what the Hub has, and this machine has not, may be downloaded.
    id
        The column of the rows' names, on which the split depends; null is their number.
    client
        The column of the client whose row it is. The partition ``natural`` needs it.
    test_fraction, seed
        Part of the rows that are tested on where there is no table of them, and what
        chooses them: that part of each client's rows, or else of each class, rounded,
        and one row of each is left to train on. Without `client`, it is about that part
        of all rows with `id`, or of the features of a ``table``. Rows of the same name
        stay together.
    """

    later: ClassVar[tuple[str, ...]] = (
        *DecodedSettings.later,
        *("image", "text", "tokenizer", "max_tokens", "download"),
        *("image_size", "channels"),
    )

    label: str
    features: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    image: str | None = None
    text: str | None = None
    tokenizer: str | None = None
    max_tokens: PositiveInt = 128
    download: bool = False
    id: str | None = None
    client: str | None = None
    test_fraction: ProperFraction = 0.2
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        require_one_kind(self)

    @abstractmethod
    def tables(self, wanted: Wanted) -> tuple[TableFile, TableFile | None]:
        """Return the wanted columns of what is trained on, and of what is tested on.

        The latter have the same features; None where there is no table of them.
        """

    @abstractmethod
    def state(self) -> Mapping[str, str | None]:
        """Return what tells whether the same settings mean the same data as before."""

    @abstractmethod
    def folder(self) -> Path:
        """Return the folder that relative paths of images start at."""

    def load(self) -> Dataset:
        """Return the rows as inputs: features as float32 of shape (1, 1, d).

        The classes are those of the training rows, in the order of their names, or of
        their numbers where all are whole numbers. A `DataError` says what is wrong with
        the files, or that test rows have labels that no training row has.
        """
        if self.image is None and self.text is None:
            return self._of_features()
        names = ("label", "image", "text", "max_tokens", "id", "client", "seed")
        chosen = {name: getattr(self, name) for name in (*names, "test_fraction")}
        source = {**self.state(), **chosen}
        if self.image is not None:
            return self.cached(source, self._write_images)
        folder = self._tokenizer_folder()
        files = sorted(one for one in folder.iterdir() if one.is_file())
        source["tokenizer"] = state_of_files(files, folder)
        return cached_dataset(self.name, source, self._write_texts)

    def _tokenizer_folder(self) -> Path:
        name = str(self.tokenizer)
        return hub_folder(name, download=self.download, extra="transformers")

    def _parts(self) -> "_Parts":
        """Return the rows of each split."""
        texts = (self.label, self.id, self.client, self.text)
        is_row = self.image is None and self.text is None
        features = self.features if is_row else ()
        train, test = self.tables(Wanted.of(texts, features, self.image))
        if test is None:
            rows = _Rows.of(train, self)
            # Features of tables were divided otherwise before there were other inputs.
            is_alike = not is_row or self.name != "table"
            is_test = _tested(rows, self, is_alike=is_alike)
            parts = {"train": rows.taken(~is_test), "test": rows.taken(is_test)}
        else:
            parts = {"train": _Rows.of(train, self), "test": _Rows.of(test, self)}
        _require_rows(parts["train"], parts["test"], given=test is not None)
        class_names = train.class_names or values_in_order(parts["train"].labels)
        where = str(parts["test"].table.path)
        require_known(parts["test"].labels, class_names, where)
        owned = [part.clients for part in parts.values() if part.clients is not None]
        owners = values_in_order(name for part in owned for name in part)
        return _Parts(parts["train"], parts["test"], class_names, owners)

    def _of_features(self) -> Dataset:
        parts = self._parts()
        numbers = parts.train.numbers()
        # A feature that never varies has a deviation of 1.
        constant = np.ptp(numbers, axis=0) == 0
        std = tuple(np.where(constant, 1.0, numbers.std(axis=0)).tolist())
        mean = tuple(numbers.mean(axis=0).tolist())
        _warn_of_coarse(parts.train.table, numbers)
        num_classes = len(parts.class_names)
        return Dataset(
            name=self.name,
            train=_labelled(parts.train, parts),
            test=_labelled(parts.test, parts),
            spec=InputSpec((1, 1, len(std)), num_classes, mean, std, "float32"),
            class_names=parts.class_names,
            feature_names=parts.train.table.feature_names,
            client_names=parts.owners,
        )

    def _write_texts(self, writer: EntryWriter) -> Contents:
        parts = self._parts()
        tokenizer = open_tokenizer(self._tokenizer_folder(), self.max_tokens)
        for split, part in parts.splits():
            texts = part.table.filled_texts(str(self.text))
            some = [texts[row] for row in part.rows]
            writer.put_images(split, tokenizer(some, str(part.table.path)))
        _describe(writer, parts)
        names, vocabulary = parts.class_names, tokenizer.vocabulary
        return Contents(
            names, dtype="ids", vocabulary=vocabulary, client_names=parts.owners
        )

    def _write_images(self, writer: EntryWriter) -> Contents:
        parts = self._parts()
        files = {
            split: Pictures(part.table, str(self.image), self.folder(), part.rows)
            for split, part in parts.splits()
        }

        def describe(writer: EntryWriter) -> Contents:
            _describe(writer, parts)
            return Contents(parts.class_names, client_names=parts.owners)

        return self.written(writer, files, describe)


@dataclass(frozen=True)
class Pictures(Sequence[Picture]):
    """The images in some rows of a column: paths below a folder, or files' contents."""

    table: TableFile
    column: str
    folder: Path
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        row = int(self.rows[at])
        value = self.table.raw[self.column][row].as_py()
        if isinstance(value, Mapping):  # as Hugging Face keeps images
            content = value.get("bytes")
            value = value.get("path") if content is None else content
        if isinstance(value, str) and value:
            return str(self.folder / value)
        name = f"{self.table.path}, row {row + 1}, counting from 1,"
        return Encoded(name, value if isinstance(value, bytes) else b"")


@dataclass(frozen=True)
class _Rows:
    """Some rows of a table, ``rows`` (n,), with n texts each."""

    table: TableFile
    rows: NDArray[np.int64]
    labels: NDArray[np.object_]
    clients: NDArray[np.object_] | None

    @classmethod
    def of(cls, table: TableFile, settings: ColumnSettings) -> "_Rows":
        labels = np.array(table.filled_texts(settings.label), dtype=object)
        clients = None
        if settings.client is not None:
            clients = np.array(table.filled_texts(settings.client), dtype=object)
        return cls(table, np.arange(len(labels)), labels, clients)

    def taken(self, chosen: NDArray[np.bool_]) -> "_Rows":
        clients = None if self.clients is None else self.clients[chosen]
        return _Rows(self.table, self.rows[chosen], self.labels[chosen], clients)

    def numbers(self) -> NDArray[np.float64]:
        """Return the features, shape (n, d)."""
        return self.table.numbers[self.rows]


@dataclass(frozen=True)
class _Parts:
    """Both splits, and the names of classes and clients in them."""

    train: _Rows
    test: _Rows
    class_names: tuple[str, ...]
    owners: tuple[str, ...]

    def splits(self) -> tuple[tuple[Split, _Rows], ...]:
        """Return the splits with their names."""
        return ("train", self.train), ("test", self.test)


def _tested(
    rows: _Rows, settings: ColumnSettings, *, is_alike: bool
) -> NDArray[np.bool_]:
    """Mark the rows that are tested on where there is no table of them, shape (n,)."""
    table, names = rows.table, rows.table.row_names()
    fraction, seed = settings.test_fraction, settings.seed
    if settings.id is not None:
        names = table.filled_texts(settings.id)
    elif settings.client is None and is_alike:
        labels = rows.labels.tolist()
        marks = mark_by_group(labels, names, labels, fraction, seed)
        return np.array(marks, dtype=bool)
    if settings.client is None:
        splits = split_by_name(names, FractionSettings(0.0, fraction, seed))
        return np.array([split == "test" for split in splits], dtype=bool)
    # Of each client's rows, those with some of the names that it has.
    dividing = DividingSettings(test_fraction=fraction, seed=seed)
    pairs = list(zip(table.filled_texts(settings.client), names, strict=True))
    names_of = defaultdict[str, set[str]](set)
    for client, name in pairs:
        names_of[client].add(name)
    tested = set[tuple[str, str]]()
    for client, own in names_of.items():
        marks = mark_tested(len(own), client, dividing).tolist()
        marked = zip(sorted(own), marks, strict=True)
        tested.update((client, name) for name, is_test in marked if is_test)
    return np.array([pair in tested for pair in pairs], dtype=bool)


def _require_rows(train: _Rows, test: _Rows, *, given: bool) -> None:
    if not len(train.labels):
        raise DataError(f"{train.table.path}: there are no training rows; add some")
    if len(test.labels):
        return
    if given:
        raise DataError(
            f"{test.table.path}: there are no test rows; add some, or leave out "
            "data.test to test on data.test_fraction of the rows of data.train"
        )
    raise DataError(
        f"{train.table.path}: there are no test rows among {len(train.labels)}; raise "
        "data.test_fraction, of which a client's only row is never taken, or name a "
        "file of test rows in data.test"
    )


def _labelled(rows: _Rows, parts: _Parts) -> LabelledArrays:
    inputs = rows.numbers().astype(np.float32)
    clients = None if rows.clients is None else numbered(rows.clients, parts.owners)
    return LabelledArrays(
        images=inputs.reshape(len(inputs), 1, 1, -1),
        labels=numbered(rows.labels, parts.class_names),
        client_ids=clients,
    )


def _describe(writer: EntryWriter, parts: _Parts) -> None:
    """Store labels and clients of both splits."""
    for split, part in parts.splits():
        writer.put_labels(split, numbered(part.labels, parts.class_names))
        if part.clients is not None:
            writer.put_client_ids(split, numbered(part.clients, parts.owners))


def _warn_of_coarse(table: TableFile, numbers: NDArray[np.float64]) -> None:
    """Say which features float32 holds too coarsely, such as times since 1970."""
    step = _STEP * np.abs(numbers.mean(axis=0))
    varies = np.ptp(numbers, axis=0) > 0
    is_coarse = varies & (numbers.std(axis=0) < _FEWEST_STEPS * step)
    if is_coarse.any():
        columns = [table.feature_names[at] for at in np.flatnonzero(is_coarse)]
        _LOG.warning(
            "%s: values of %s are so large, and differ so little, that float32 loses "
            "their differences; subtract an offset from these columns, such as their "
            "least value, in all files",
            table.path,
            ", ".join(columns),
        )
