"""Data sets in tables: the meaning of columns, and the split of rows."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.cache import (
    CentralSplit,
    DatasetContents,
    EntryWriter,
    cached_dataset,
    state_of_files,
)
from knnper.data.columns import ColumnSelection, TableFile
from knnper.data.dividing import (
    DividingSettings,
    FractionSettings,
    mark_by_group,
    mark_tested,
    numbered,
    require_known,
    sorted_values,
    split_by_name,
    warn_of_merged,
)
from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.data.features import warn_of_coarse
from knnper.data.hub import find_hub_folder
from knnper.data.images import EncodedImage, ImageSettings, ImageSource
from knnper.data.tokens import open_tokenizer
from knnper.errors import DataError
from knnper.settings import NonNegativeInt, PositiveInt, ProperFraction


def require_one_kind(settings: Any) -> None:
    """Raise if settings name several kinds of inputs, or texts without a tokenizer."""
    kinds = ("features", "image", "text")
    chosen = [kind for kind in kinds if getattr(settings, kind) is not None]
    if len(chosen) > 1:
        raise ValueError(
            f"found {' and '.join(chosen)}, expected one of them: inputs are of one "
            "kind"
        )
    text, tokenizer = settings.text, settings.tokenizer
    if (text is None) != (tokenizer is None):
        raise ValueError(
            f"found the text {text!r} with the tokenizer {tokenizer!r}, expected both "
            "or none of them"
        )


@dataclass(frozen=True, kw_only=True)
class ColumnSettings(ImageSettings):
    """Base class of formats of tables: the meaning of columns.

    Attributes
    ----------
    label
        The column of labels.
    features
        The columns of features: numbers, or lists of numbers of the same length. If
        `image` and `text` are null, null selects all other columns except for a pandas
        index.
    image
        The column of images: paths or contents of files.
    text
        The column of texts, each classified as a whole.
    tokenizer
        Folder of a tokenizer (package transformers), or its name on the Hugging Face
        Hub.
    max_tokens
        Ids per text, T; longer texts are truncated.
    download
        Whether missing files may be downloaded from the Hub.
    id
        The column of the rows' names, on which the split depends; null is the row
        number.
    client
        The column of the client of each row; required by the partition ``natural``.
    test_fraction, seed
        Fraction of test rows if there is no table of them, and the seed of their
        choice: of each client, or else of each class, rounded; at least one row of each
        is left for training. Without `client`, but with `id` or for the features of a
        ``table``, it is approximately this fraction of all rows. Rows of the same name
        stay together.
    """

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
    def tables(self, selection: ColumnSelection) -> tuple[TableFile, TableFile | None]:
        """Read the selected columns of the training rows and the test rows.

        The test table has the same features; None if there is no such table.
        """

    @abstractmethod
    def state(self) -> Mapping[str, str | None]:
        """Return the state of the files, as part of the cache key."""

    @abstractmethod
    def folder(self) -> Path:
        """Return the folder of relative paths of images."""

    def load(self) -> Dataset:
        """Load the rows as inputs: features as float32 of shape (1, 1, d).

        The classes are those of the training rows in the order of their names, or
        numerically if all are whole numbers. Raises a `DataError` if the files are not
        valid, or if test rows have classes that no training row has.
        """
        if self.image is None and self.text is None:
            return self._of_features()
        names = ("label", "image", "text", "max_tokens", "id", "client", "seed")
        chosen = {name: getattr(self, name) for name in (*names, "test_fraction")}
        source = {**self.state(), **chosen}
        if self.image is not None:
            return self.load_cached(source, self._write_images)
        folder = self._tokenizer_folder()
        files = sorted(file for file in folder.iterdir() if file.is_file())
        source["tokenizer"] = state_of_files(files, folder)
        return cached_dataset(self.name, source, self._write_texts)

    def _tokenizer_folder(self) -> Path:
        name = str(self.tokenizer)
        return find_hub_folder(name, download=self.download, extra="transformers")

    def _parts(self) -> "_Parts":
        """Read the tables and split their rows."""
        texts = (self.label, self.id, self.client, self.text)
        is_row = self.image is None and self.text is None
        features = self.features if is_row else ()
        train, test = self.tables(ColumnSelection.of(texts, features, self.image))
        if test is None:
            rows = _Rows.of(train, self)
            # Features of a ``table`` are split by the hash of the row's name alone; all
            # other inputs by class.
            is_alike = not is_row or self.name != "table"
            is_test = _mark_test_rows(rows, self, is_alike=is_alike)
            parts = {"train": rows.taken(~is_test), "test": rows.taken(is_test)}
        else:
            parts = {"train": _Rows.of(train, self), "test": _Rows.of(test, self)}
        _require_rows(parts["train"], parts["test"], has_test_table=test is not None)
        tables = [train] if test is None else [train, test]
        for column, kind in ((self.label, "labels"), (self.client, "clients")):
            if column is not None:
                written = (name for table in tables for name in table.texts[column])
                warn_of_merged(written, kind, str(train.path))
        class_names = train.class_names or sorted_values(parts["train"].labels)
        where = str(parts["test"].table.path)
        require_known(parts["test"].labels, class_names, where)
        owned = [part.clients for part in parts.values() if part.clients is not None]
        owners = sorted_values(name for part in owned for name in part)
        return _Parts(parts["train"], parts["test"], class_names, owners)

    def _of_features(self) -> Dataset:
        parts = self._parts()
        numbers = parts.train.numbers()
        # Inputs are divided by the deviation, so a constant feature gets 1.
        constant = np.ptp(numbers, axis=0) == 0
        std = tuple(np.where(constant, 1.0, numbers.std(axis=0)).tolist())
        mean = tuple(numbers.mean(axis=0).tolist())
        warn_of_coarse(
            numbers, parts.train.table.feature_names, str(parts.train.table.path)
        )
        num_classes = len(parts.class_names)
        return Dataset(
            name=self.name,
            train=_as_labelled_arrays(parts.train, parts),
            test=_as_labelled_arrays(parts.test, parts),
            spec=InputSpec((1, 1, len(std)), num_classes, mean, std, "float32"),
            class_names=parts.class_names,
            feature_names=parts.train.table.feature_names,
            client_names=parts.owners,
        )

    def _write_texts(self, writer: EntryWriter) -> DatasetContents:
        parts = self._parts()
        tokenizer = open_tokenizer(self._tokenizer_folder(), self.max_tokens)
        for split, part in parts.splits():
            texts = part.table.filled_texts(str(self.text))
            some = [texts[row] for row in part.rows]
            writer.put_images(split, tokenizer(some, str(part.table.path)))
        _write_labels(writer, parts)
        names, vocabulary = parts.class_names, tokenizer.vocabulary
        return DatasetContents(
            names, dtype="ids", vocabulary=vocabulary, client_names=parts.owners
        )

    def _write_images(self, writer: EntryWriter) -> DatasetContents:
        parts = self._parts()
        files = {
            split: PictureColumn(part.table, str(self.image), self.folder(), part.rows)
            for split, part in parts.splits()
        }

        def describe(writer: EntryWriter) -> DatasetContents:
            _write_labels(writer, parts)
            return DatasetContents(parts.class_names, client_names=parts.owners)

        return self.write_entry(writer, files, describe)


@dataclass(frozen=True)
class PictureColumn(Sequence[ImageSource]):
    """Images in rows of a column: paths below a folder, or contents of files."""

    table: TableFile
    column: str
    folder: Path
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        row = int(self.rows[at])
        value = self.table.raw[self.column][row].as_py()
        if isinstance(value, Mapping):  # the image type of Hugging Face
            content = value.get("bytes")
            value = value.get("path") if content is None else content
        if isinstance(value, str) and value:
            return str(self.folder / value)
        name = f"{self.table.path}, row {row + 1}, counting from 1,"
        return EncodedImage(name, value if isinstance(value, bytes) else b"")


@dataclass(frozen=True)
class _Rows:
    """Rows of a table, ``rows`` (n,), with the label and the client of each."""

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
        """Return the features of the rows, shape (n, d)."""
        return self.table.numbers[self.rows]


@dataclass(frozen=True)
class _Parts:
    """Both splits, and the names of their classes and clients."""

    train: _Rows
    test: _Rows
    class_names: tuple[str, ...]
    owners: tuple[str, ...]

    def splits(self) -> tuple[tuple[CentralSplit, _Rows], ...]:
        """Return both splits with their names."""
        return ("train", self.train), ("test", self.test)


def _mark_test_rows(
    rows: _Rows, settings: ColumnSettings, *, is_alike: bool
) -> NDArray[np.bool_]:
    """Mark the test rows if there is no table of them, shape (n,)."""
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
    # The split is made over the names of each client's rows, not over its rows.
    dividing = DividingSettings(test_fraction=fraction, seed=seed)
    pairs = list(zip(table.names(settings.client), names, strict=True))
    names_of = defaultdict[str, set[str]](set)
    for client, name in pairs:
        names_of[client].add(name)
    tested = set[tuple[str, str]]()
    for client, client_names in names_of.items():
        marks = mark_tested(len(client_names), client, dividing).tolist()
        marked = zip(sorted(client_names), marks, strict=True)
        tested.update((client, name) for name, is_test in marked if is_test)
    return np.array([pair in tested for pair in pairs], dtype=bool)


def _require_rows(train: _Rows, test: _Rows, *, has_test_table: bool) -> None:
    if not len(train.labels):
        raise DataError(f"{train.table.path}: found no training rows; add some")
    if len(test.labels):
        return
    if has_test_table:
        raise DataError(
            f"{test.table.path}: found no test rows; add some, or leave out data.test "
            "to test on data.test_fraction of the rows of data.train"
        )
    raise DataError(
        f"{train.table.path}: found no test rows among {len(train.labels)}; raise "
        "data.test_fraction (the only row of a client is always used for training), or "
        "name a file of test rows in data.test"
    )


def _as_labelled_arrays(rows: _Rows, parts: _Parts) -> LabelledArrays:
    inputs = rows.numbers().astype(np.float32)
    clients = None if rows.clients is None else numbered(rows.clients, parts.owners)
    return LabelledArrays(
        images=inputs.reshape(len(inputs), 1, 1, -1),
        labels=numbered(rows.labels, parts.class_names),
        client_ids=clients,
    )


def _write_labels(writer: EntryWriter, parts: _Parts) -> None:
    """Store the labels and clients of both splits."""
    for split, part in parts.splits():
        writer.put_labels(split, numbered(part.labels, parts.class_names))
        if part.clients is not None:
            writer.put_client_ids(split, numbered(part.clients, parts.owners))
