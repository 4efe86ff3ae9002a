"""Data sets in CSV or Parquet files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from typing_extensions import override

from knnper.data.cache import state_of_files
from knnper.data.column_settings import ColumnSettings, require_one_kind
from knnper.data.columns import (
    ColumnSelection,
    TableFile,
    arrow,
    extract_columns,
    select_number_columns,
)
from knnper.data.csv_files import csv_problem, header_of, quote_problem, row_error
from knnper.data.dividing import are_whole_numbers
from knnper.data.examples import KINDS_OF_INPUT, Vocabulary
from knnper.data.features import require_order
from knnper.data.hub import find_hub_folder
from knnper.data.images import ImageFiles
from knnper.data.site_data import CollectedExamples, SiteSettings, place_of, split_texts
from knnper.data.site_inputs import ArrayInputs, InputForm, ReadInputs, SiteInputs
from knnper.data.site_task import SiteTask
from knnper.data.tokens import open_tokenizer
from knnper.errors import DataError
from knnper.reasons import Code, SafeReason
from knnper.settings import PositiveInt

_PARQUET = (".parquet", ".pq")
_CSV = (".csv", ".tsv", ".txt")
_LARGEST_BLOCK = 2**31 - 1
_ELSEWHERE = (".json", ".jsonl", ".arrow", ".feather")
_DELIMITER_ADVICE = "set data.delimiter: {!r}"
_Names = tuple[str, ...]


def read_table(
    path: Path, selection: ColumnSelection, delimiter: str = ","
) -> TableFile:
    """Read columns of a CSV file with a header, or of a Parquet file."""
    if not path.is_file():
        raise DataError(
            f"{path}: the file does not exist; give a CSV or Parquet file",
            reason=SafeReason(Code.MISSING_FILE),
        )
    lib, is_csv = arrow("lib"), path.suffix.lower() in _CSV
    if is_csv:
        delimiter = _delimiter(path, delimiter)
    schema_of, read = _reader(path, delimiter)
    try:
        schema = schema_of()
        columns = select_number_columns(schema, selection, path)
        table = read(selection.columns_in(schema), columns)
        if is_csv and (problem := quote_problem(path, delimiter)):
            raise DataError(problem, reason=SafeReason(Code.UNREADABLE_FILE))
        return extract_columns(table, selection, columns, path)
    except (DataError, lib.ArrowException, OSError, UnicodeDecodeError) as error:
        explained = _explain(error, path, delimiter if is_csv else None)
        if explained is error:
            raise
        raise explained from error


def _explain(error: Exception, path: Path, delimiter: str | None) -> DataError:
    """Turn an error of reading into one that names the cause.

    ``delimiter`` is that of a CSV file, None for other files.
    """
    problem = None
    if delimiter is not None:
        problem = csv_problem(path, delimiter, _DELIMITER_ADVICE)
    reason = SafeReason(Code.UNREADABLE_FILE)
    if isinstance(error, DataError):
        if problem is None:
            return error
        reason = error.reasons[0]
    elif problem is None and (wrong_row := row_error(path, str(error))):
        return wrong_row
    message = f"{path} cannot be read as a table: {problem or error}"
    return DataError(message, reason=reason)


def _reader(
    path: Path, delimiter: str
) -> tuple[Callable[[], Any], Callable[[_Names, _Names], Any]]:
    """Return a function that reads a file's schema, and one that reads columns."""
    suffix = path.suffix.lower()
    if suffix in _PARQUET:
        parquet = arrow("parquet")

        def some(texts: _Names, numbers: _Names) -> Any:
            columns = [*texts, *numbers]
            return parquet.read_table(path, columns=columns, use_threads=False)

        return lambda: parquet.read_schema(path), some
    if suffix not in _CSV:
        folder = "; data.name: hugging_face reads a folder of such files"
        raise DataError(
            f"{path}: found the suffix {suffix!r}, expected one of "
            f"{', '.join((*_CSV, *_PARQUET))}{folder if suffix in _ELSEWHERE else ''}"
        )
    if len(delimiter) != 1:
        raise DataError(
            f"{path}: found the delimiter {delimiter!r}, expected one character"
        )
    csv = arrow("csv")
    parsing = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)

    def schema() -> Any:
        def read_beginning(options: Any) -> Any:
            with csv.open_csv(path, options, parsing) as reader:
                return reader.schema

        return _read_with_large_block(path, read_beginning)

    def read(texts: _Names, numbers: _Names) -> Any:
        # Without types, Arrow would read the text "01" as the number 1.
        types = dict.fromkeys(texts, arrow("lib").string())
        columns = [*texts, *numbers]
        convert = csv.ConvertOptions(column_types=types, include_columns=columns)
        return _read_with_large_block(
            path, lambda options: csv.read_csv(path, options, parsing, convert)
        )

    return schema, read


def _delimiter(path: Path, delimiter: str) -> str:
    """Return the delimiter: a tab for .tsv files with tabs, unless one is set."""
    is_tabbed = path.suffix.lower() == ".tsv" and "\t" in header_of(path)
    return "\t" if is_tabbed and delimiter == "," else delimiter


def _read_with_large_block(path: Path, read: Callable[[Any], Any]) -> Any:
    """Call ``read`` with options for a CSV file, in one block if a row is long."""
    csv, lib = arrow("csv"), arrow("lib")
    try:
        return read(csv.ReadOptions(use_threads=False))
    except lib.ArrowInvalid as error:
        if "block size" not in str(error):
            raise
    size = min(path.stat().st_size + 1, _LARGEST_BLOCK)
    return read(csv.ReadOptions(use_threads=False, block_size=size))


@dataclass(frozen=True, kw_only=True)
class TableSettings(ColumnSettings):
    """Settings of the files, and the meaning of their columns.

    Attributes
    ----------
    train
        A CSV file with a header, in UTF-8, or a Parquet file.
    test
        A file of test rows; null takes `test_fraction` of the rows of `train`.
    root
        Folder of relative paths of images; null is the folder of `train`.
    delimiter
        Character between the columns of a CSV file; tabs of a .tsv file are found.
    """

    name = "table"
    title = "Table"
    summary = "your own rows: CSV or Parquet files with features, images or texts"

    train: str
    test: str | None = None
    root: str | None = None
    delimiter: Annotated[str, Field(min_length=1)] = ","

    @override
    def tables(self, selection: ColumnSelection) -> tuple[TableFile, TableFile | None]:
        paths = self._paths()
        train = read_table(paths[0], selection, self.delimiter)
        if len(paths) == 1:
            return train, None
        same = replace(selection, numbers=train.number_columns)
        return train, read_table(paths[1], same, self.delimiter)

    @override
    def state(self) -> Mapping[str, str | None]:
        """Return the state of the tables and of image files named in them."""
        files = self._paths()
        if self.image is not None:
            for path in self._paths():
                files += _files_named(path, self.image, self.delimiter, self.folder())
        state = state_of_files(files, files[0].parent)
        return {"files": state, "root": str(self.folder()), "split": self.delimiter}

    @override
    def folder(self) -> Path:
        return _absolute(self.root) if self.root else self._paths()[0].parent

    def _paths(self) -> list[Path]:
        return [_absolute(path) for path in (self.train, self.test) if path is not None]


def _files_named(path: Path, column: str, delimiter: str, folder: Path) -> list[Path]:
    """Return the files named by a column of paths; none for a column of contents."""
    schema_of, _ = _reader(path, delimiter)
    if path.suffix.lower() in _PARQUET and path.is_file():
        kinds = schema_of()
        if column in kinds.names and kinds.field(column).type != "string":
            return []
    texts = read_table(path, ColumnSelection((column,), ()), delimiter).texts[column]
    return [folder / text for text in texts if text]


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


@dataclass(frozen=True)
class SiteTableSettings(SiteSettings):
    """Settings of a site's table, and the meaning of its columns.

    Attributes
    ----------
    path
        A CSV file with a header, in UTF-8, or a Parquet file.
    label
        The column of labels: names of classes, or whole numbers.
    features
        The columns of features in the federation's order. Null selects the federation's
        features by name or, if they have no names, all other columns except for a
        pandas index.
    image
        The column of paths of image files, relative to the table's folder.
    text
        The column of texts, each classified as a whole.
    tokenizer
        Folder of the federation's tokenizer (package transformers), or its name on the
        Hugging Face Hub. It is not downloaded.
    max_tokens
        Ids per text, used if there is no federation yet.
    id
        The column of the examples' names; null names them by row number.
    split
        The column with train, validation or test; null splits by `fractions`.
    delimiter
        Between the columns of a CSV file.
    """

    name = "table"
    title = "Table"
    summary = "a CSV or Parquet file: a row an example, a column a feature"

    path: str
    label: str
    features: tuple[str, ...] | None = None
    image: str | None = None
    text: str | None = None
    tokenizer: str | None = None
    max_tokens: PositiveInt = 128
    id: str | None = None
    split: str | None = None
    delimiter: Annotated[str, Field(min_length=1)] = ","

    def __post_init__(self) -> None:
        require_one_kind(self)

    def collect(self, base: Path, task: SiteTask | None) -> CollectedExamples:
        """Collect the examples of the table."""
        texts = (self.label, self.id, self.split, self.text, self.image)
        features = self.features
        if self.image is not None or self.text is not None:
            features = ()
        elif features is None and task is not None:
            features = task.feature_names or None
        path = place_of(base, self.path)
        table = read_table(path, ColumnSelection.of(texts, features), self.delimiter)
        source = str(path)
        labels = table.filled_texts(self.label)
        feature_names = table.feature_names
        if self.features is not None and task is not None:
            # Matched by position: the site may use other names than the federation.
            require_order(feature_names, task.feature_names, source)
            feature_names = task.feature_names
        splits = None
        if self.split is not None:
            splits = split_texts(table.texts[self.split], source)
        return CollectedExamples(
            source=source,
            names=table.row_names() if self.id is None else table.texts[self.id],
            labels=labels,
            inputs=self._inputs(table, base),
            splits=splits,
            given_splits=frozenset(splits or ()),
            numbered=are_whole_numbers(table.names(self.label)),
            feature_names=feature_names,
        )

    def _inputs(self, table: TableFile, base: Path) -> SiteInputs:
        if self.image is not None:
            paths = table.filled_texts(self.image)
            return ImageFiles(table.path.parent, paths)
        if self.text is None:
            return ArrayInputs(str(table.path), table.numbers)
        texts = table.filled_texts(self.text)
        place = place_of(base, str(self.tokenizer))
        name = str(place) if place.is_dir() else str(self.tokenizer)
        folder = find_hub_folder(name, download=False, extra="transformers")
        return TextInputs(str(table.path), texts, folder, self.max_tokens)


@dataclass(frozen=True, eq=False)
class TextInputs(SiteInputs):
    """Inputs as texts, converted to ids by the tokenizer in a folder."""

    source: str
    texts: tuple[str, ...]
    folder: Path
    max_tokens: int

    @property
    @override
    def vocabulary(self) -> Vocabulary:
        return open_tokenizer(self.folder, self.max_tokens).vocabulary

    @override
    def form(self) -> InputForm:
        return (1, 1, self.max_tokens), "ids"

    def read(
        self,
        positions: Sequence[int],
        task: SiteTask,
        cache: Path | None = None,  # noqa: ARG002 - fast without
    ) -> ReadInputs:
        """Convert texts to ids; raise unless the federation has the same tokenizer."""
        agreed = task.spec.vocabulary
        if agreed is None:
            raise DataError(
                f"{self.source} holds texts, but the federation agreed on "
                f"{KINDS_OF_INPUT[task.spec.dtype]}; give data of another kind",
                reason=SafeReason(Code.WRONG_KIND),
            )
        # The federation's number of ids per text, not this site's ``max_tokens``.
        tokenizer = open_tokenizer(self.folder, task.spec.image_shape[2])
        # Any tokenizer fits one of unknown digest, if size and padding are equal.
        if tokenizer.vocabulary != replace(
            agreed, tokenizer=agreed.tokenizer or tokenizer.vocabulary.tokenizer
        ):
            raise DataError(
                f"{self.folder} holds another tokenizer than the federation's; set "
                "data.tokenizer to the folder from the federation's operator",
                reason=SafeReason(Code.WRONG_TOKENIZER),
            )
        ids = tokenizer([self.texts[at] for at in positions], self.source)
        return ReadInputs(torch.from_numpy(ids))
