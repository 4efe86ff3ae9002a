"""Columns of a table as labelled inputs: rows of features, images, texts."""

import re
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from knnper.data.csv_files import other_delimiter
from knnper.data.dividing import (
    DividingSettings,
    FractionSettings,
    clean_name,
    clean_names,
    mark_by_group,
    mark_tested,
    numbered,
    require_known,
    split_by_name,
    values_in_order,
    warn_of_merged,
)
from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.data.features import (
    clean_features,
    pandas_index,
    warn_of_coarse,
    warn_of_row_numbers,
    without_index,
)
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

# What pandas and NumPy write where a number is missing.
_NOT_A_NUMBER = ("nan", "NaN")

_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS = ("integer", "floating", "boolean", "decimal", "null")
_CONTENTS = ("string", "large_string", "binary", "large_binary", "struct", "null")

# A place in a column of lists.
_PLACE = re.compile(r"(.*)\[\d+\]", re.DOTALL)

# How PNG, JPEG, GIF, WebP and TIFF files begin in base64.
_BASE64 = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")


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
    parts: tuple[tuple[Path, int], ...] = ()  # path and rows of tables that were joined

    def filled_texts(self, column: str) -> tuple[str, ...]:
        """Return the texts of a column, none of which is empty or ``nan``."""
        return self._filled(column, self.texts[column])

    def names(self, column: str) -> tuple[str, ...]:
        """Return the labels or clients in a column, each as `clean_name` does."""
        return self._filled(column, clean_names(self.texts[column]))

    def _filled(self, column: str, texts: tuple[str, ...]) -> tuple[str, ...]:
        missing = ("", *_NOT_A_NUMBER)
        rows = [row for row, text in enumerate(texts) if text in missing]
        if rows:
            found = texts[rows[0]] or "nothing"
            path, row = self.place_of(rows[0])
            raise DataError(
                f"{path}: {len(rows)} rows hold {found} in the column {column!r}, "
                f"the first of them is row {row + 1}, counting from 1; fill them in, "
                "or leave the rows out",
                reason=SafeReason(Code.MISSING_VALUE, count=len(rows), row=row + 1),
            )
        return texts

    def place_of(self, row: int) -> tuple[Path, int]:
        """Return the path of the table that a row is from, and its row there."""
        for path, num_rows in self.parts:
            if row < num_rows:
                return path, row
            row -= num_rows
        return self.path, row

    def join(self, other: "TableFile") -> "TableFile":
        """Return the rows of this table followed by those of another."""
        chunked = arrow("lib").chunked_array
        return replace(
            self,
            texts={name: self.texts[name] + other.texts[name] for name in self.texts},
            numbers=np.concatenate([self.numbers, other.numbers]),
            raw={
                name: chunked([*column.chunks, *other.raw[name].chunks])
                for name, column in self.raw.items()
            },
            parts=(
                *(self.parts or ((self.path, len(self.numbers)),)),
                (other.path, len(other.numbers)),
            ),
        )

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

    def columns_in(self, schema: Any) -> tuple[str, ...]:
        """Return the names in a table of the columns that are no features."""
        return tuple(map(_finder(schema), self.as_they_are))


def arrow(module: str) -> Any:
    """Return a module of pyarrow."""
    return import_extra(f"pyarrow.{module}", "tables", "reading tables")


def columns_of(
    table: Any, wanted: Wanted, numbers: tuple[str, ...], path: Path
) -> TableFile:
    """Return the wanted columns of Arrow's ``table``; see `number_columns`."""
    find = _finder(table.schema)
    texts = {
        name: _texts(table.column(find(name)), name, path) for name in wanted.texts
    }
    raw = {name: table.column(find(name)) for name in wanted.raw}
    for name, column in raw.items():
        _require_contents(column.type, name, path)
    parts = {name: _scalars(table.column(name), name, path) for name in numbers}
    columns: dict[str, Any] = {}
    for name in numbers if wanted.numbers is None else wanted.numbers:
        scalars = parts[find(name)]
        if name in scalars:
            columns[name] = scalars[name]
        elif clean_name(name) == clean_name(find(name)):
            columns |= scalars
        else:
            raise DataError(
                f"{path} has no feature {name!r}; {alternatives(name, scalars)}",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )
    values = _numbers(columns, table.num_rows, path)
    names = clean_features(tuple(columns))
    if wanted.numbers is None:
        warn_of_row_numbers(values, names, str(path))
    return TableFile(path, texts, wanted.numbers or numbers, names, values, raw)


def number_columns(
    schema: Any, wanted: Wanted, path: Path, index: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Return the columns of features; refuse what is not there, or no number.

    Those of ``index``, and what pandas calls its index, are features only by name.
    """
    # Nothing is read of columns without a name.
    counts = Counter(name for name in schema.names if name)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise DataError(
            f"{path} has more than one column {twice[0]!r}; rename one",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    find, known = _finder(schema), frozenset(schema.names)
    if wanted.numbers is None:
        others = set(map(find, wanted.as_they_are))
        rest = [name for name in schema.names if name not in others]
        numbers = without_index(rest, index | pandas_index(schema.metadata), str(path))
    else:
        numbers = wanted.numbers
    for name, count in Counter((*wanted.as_they_are, *numbers)).items():
        if find(name) not in known:
            raise DataError(
                f"{path} has no column {name!r}; {_known(name, schema)}",
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
    columns = tuple(dict.fromkeys(map(find, numbers)))
    _require_numbers(schema, columns, path)
    return columns


def _finder(schema: Any) -> Callable[[str], str]:
    """Return a function from a wanted name to the name of a column in the table.

    Names may differ in white space and Unicode form, or name a position in a column of
    lists, as in ``vector[3]``. Names without a column are returned unchanged.
    """
    known = frozenset(schema.names)
    clean = defaultdict[str, list[str]](list)
    for column in schema.names:
        clean[clean_name(column)].append(column)

    def find(name: str) -> str:
        if name in known:
            return name
        alike = clean[clean_name(name)]
        if len(alike) == 1:
            return alike[0]
        place = _PLACE.fullmatch(name)
        return name if place is None or place[1] not in known else place[1]

    return find


def _known(name: str, schema: Any) -> str:
    """Return the end of an error about a column that a table does not have."""
    if len(schema.names) == 1:
        other = other_delimiter(schema.names[0], ",")
        if other is not None:
            return (
                f"its only column is {schema.names[0]!r}: write its files with commas "
                f"in place of {other!r}, or read them with data.name: table"
            )
    return alternatives(name, schema.names)


def _require_contents(kind: Any, name: str, path: Path) -> None:
    """Refuse a column that holds no images."""
    if not _is_any(kind, _CONTENTS):
        raise DataError(
            f"{path}: found {kind} in the column {name!r}, expected paths of image "
            "files, or files' contents (binary); save pixels as PNG files, or all "
            "images as an array in an .npz file (data.name: npz)",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )


def _is_any(kind: Any, names: Sequence[str]) -> bool:
    types = arrow("types")
    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _require_numbers(schema: Any, columns: Sequence[str], path: Path) -> None:
    types = {name: schema.field(name).type for name in columns}
    other = [
        f"{name} ({kind})"
        for name, kind in types.items()
        if not _is_any(kind.value_type if _is_list(kind) else kind, _NUMBERS)
    ]
    if other:
        raise DataError(
            f"{path}: features must be numbers, found the columns {', '.join(other)}; "
            "list the columns to use (data.features), turn these into numbers (with a "
            "point, not a comma), or say that they hold images or texts (data.image, "
            "data.text)",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )


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


def _texts(column: Any, name: str, path: Path) -> tuple[str, ...]:
    is_real = arrow("types").is_floating(column.type)
    # Where numbers are expected, this one is what Parquet has in place of none.
    missing = (None, "nan") if is_real else (None,)
    lib = arrow("lib")
    try:
        texts = column.cast(lib.string()).to_pylist()
    except lib.ArrowException as error:
        raise DataError(
            f"{path}: found {column.type} in the column {name!r}, expected a text (in "
            "UTF-8) or a number in each row",
            reason=SafeReason(Code.WRONG_COLUMNS),
        ) from error
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
        other columns but the index of a pandas table, where there is no `image` and no
        `text`.
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
        tables = [train] if test is None else [train, test]
        for column, kind in ((self.label, "labels"), (self.client, "clients")):
            if column is not None:
                written = (name for table in tables for name in table.texts[column])
                warn_of_merged(written, kind, str(train.path))
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
        warn_of_coarse(
            numbers, parts.train.table.feature_names, str(parts.train.table.path)
        )
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
        for _, part in parts.splits():
            column = part.table.raw[str(self.image)]
            if _is_any(column.type, ("string", "large_string")):
                require_paths(part.table, str(self.image), column.to_pylist())

        def describe(writer: EntryWriter) -> Contents:
            _describe(writer, parts)
            return Contents(parts.class_names, client_names=parts.owners)

        return self.written(writer, files, describe)


def require_paths(table: TableFile, column: str, values: Sequence[str | None]) -> None:
    """Refuse images in base64 where paths or contents of files are expected."""
    for at, value in enumerate(values):
        # Paths have suffixes, and base64 has no full stop.
        if value and value.startswith(_BASE64) and "." not in value:
            path, row = table.place_of(at)
            raise DataError(
                f"{path}: found an image in base64 in the column {column!r} in row "
                f"{row + 1}, counting from 1, expected paths of image files, or in "
                "Parquet files' contents (binary); decode the column "
                "(base64.b64decode)",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )


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
        path, row = self.table.place_of(row)
        name = f"{path}, row {row + 1}, counting from 1,"
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
        labels = np.array(table.names(settings.label), dtype=object)
        clients = None
        if settings.client is not None:
            clients = np.array(table.names(settings.client), dtype=object)
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
    pairs = list(zip(table.names(settings.client), names, strict=True))
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
