"""Data sets of Hugging Face, from folders of the package datasets or the Hub."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from knnper.data.cache import cache_root, state_of_files
from knnper.data.column_settings import ColumnSettings
from knnper.data.columns import (
    ColumnSelection,
    TableFile,
    arrow,
    extract_columns,
    select_number_columns,
)
from knnper.data.dividing import (
    clean_name,
    warn_of_joined,
    warn_of_merged,
)
from knnper.data.features import pandas_index
from knnper.data.folders import unreachable_reason
from knnper.data.hub import find_hub_folder
from knnper.data.split_names import split_of
from knnper.errors import DataError, warn_once
from knnper.process import import_extra
from knnper.settings import alternatives

_LOG = logging.getLogger(__name__)

_OF_DISK = ("dataset_dict.json", "state.json")  # files written by `save_to_disk`


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSettings(ColumnSettings):
    """Settings of the data set, and the meaning of its columns.

    Attributes
    ----------
    path
        A folder written by ``save_to_disk`` or readable by ``load_dataset``, or the
        name of a data set on the Hugging Face Hub.
    config
        Configuration of the data set; null is its default.
    train
        The training split. With ``train``, validation data is added unless it is the
        test split, since each client holds out validation data of its own.
    test
        The test split; null is ``test`` if it exists, else `test_fraction` of the
        training rows.
    """

    name = "hugging_face"
    title = "Hugging Face"
    summary = "a data set of the package datasets, from a folder or the Hub"

    path: str
    config: str | None = None
    train: str = "train"
    test: str | None = None

    @override
    def tables(self, selection: ColumnSelection) -> tuple[TableFile, TableFile | None]:
        splits, path = self._open_splits(), self.folder()
        trained = _match_split(self.train, splits)
        test = _match_split(self.test or "test", splits)
        if self.test is None and test not in splits:
            test = trained
        train = self._read_split(splits, trained, selection, path)
        same = replace(selection, numbers=train.number_columns)
        validation = self._validation(splits, (trained, test))
        if validation:
            warn_of_joined(str(path), validation)
        for name in validation:
            train = train.join(self._read_split(splits, name, same, path))
        _warn_of_unused(path, set(splits) - {trained, test, *validation})
        if test == trained:
            return train, None
        return train, self._read_split(splits, test, same, path)

    def _validation(self, splits: Any, used: tuple[str, str]) -> list[str]:
        """Return the validation splits that are added to the training data."""
        if split_of(self.train) != "train":
            return []  # Any other chosen split is used alone.
        return [
            name
            for name in splits
            if name not in used and split_of(name) == "validation"
        ]

    @override
    def state(self) -> Mapping[str, str | None]:
        splits = {"config": self.config, "train": self.train, "test": self.test}
        return {
            "files": state_of_files(self._files(), self.folder()),
            # Earlier entries of the cache lack it, and the validation data.
            "validation": "joined",
            **splits,
        }

    def _files(self) -> list[Path]:
        """Return all files below the folder; raise for broken links."""
        paths = sorted(self.folder().rglob("*"))
        for path in paths:
            # The package datasets would skip it without a warning.
            if reason := unreachable_reason(str(path)):
                raise DataError(f"{path} {reason}; mount or remove it")
        return [path for path in paths if path.is_file()]

    @override
    def folder(self) -> Path:
        return find_hub_folder(
            self.path, download=self.download, extra="hf", repo_type="dataset"
        )

    def _open_splits(self) -> Any:
        """Open the splits by name, each a `datasets.Dataset`."""
        package = import_extra("datasets", "hf", "a data set of Hugging Face")
        folder = self.folder()
        self._files()
        try:
            if any((folder / name).is_file() for name in _OF_DISK):
                opened = package.load_from_disk(str(folder))
            else:
                cache = cache_root() / "hugging_face"
                package.disable_progress_bars()
                opened = package.load_dataset(
                    str(folder), self.config, cache_dir=str(cache)
                )
        # A damaged file raises errors of many types in the package and its
        # dependencies.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise DataError(
                f"{folder} cannot be read as a data set of Hugging Face: {reason}; "
                "expected a folder written by save_to_disk or readable by load_dataset"
            ) from error
        return opened if isinstance(opened, Mapping) else {self.train: opened}

    def _read_split(
        self, splits: Any, split: str, selection: ColumnSelection, path: Path
    ) -> TableFile:
        if split not in splits:
            raise DataError(
                f"{path} has no split {split!r}; {alternatives(split, splits)}"
            )
        split_rows, place = splits[split], path / split
        schema = split_rows.features.arrow_schema
        numbers = select_number_columns(schema, selection, place, _index_columns(path))
        columns = [*selection.columns_in(schema), *numbers]
        lib = arrow("lib")
        try:
            table = split_rows.select_columns(columns).with_format("arrow")[:]
            columns_read = extract_columns(table, selection, numbers, place)
        except (lib.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{place} cannot be read as a table: {error}") from error
        if self.label not in selection.texts:
            return columns_read
        column = columns[selection.other_columns.index(self.label)]
        names = getattr(split_rows.features.get(column), "names", None)
        if not names:
            return columns_read
        self._require_published(columns_read.texts[self.label], place, splits)
        if split == _match_split(self.train, splits):
            warn_of_merged(names, "classes", str(place))
        known = {str(number): clean_name(name) for number, name in enumerate(names)}
        labels = tuple(known.get(label, "") for label in columns_read.texts[self.label])
        texts = {**columns_read.texts, self.label: labels}
        classes = tuple(dict.fromkeys(known.values()))
        return replace(columns_read, texts=texts, class_names=classes)

    def _require_published(
        self, labels: tuple[str, ...], place: Path, splits: Any
    ) -> None:
        """Raise for labels of -1, which mark labels that are not published."""
        count = labels.count("-1")
        if not count:
            return
        others = [name for name in splits if split_of(name) == "validation"]
        example = f", such as data.test: {others[0]}" if others else ""
        raise DataError(
            f"{place}: {count} rows have the label -1, which marks labels that are not "
            "published, as in GLUE's test data; name another split (data.train, "
            f"data.test{example}), or leave the rows out"
        )


def _match_split(name: str, splits: Iterable[str]) -> str:
    """Return the data set's spelling of a split, or ``name`` if it has none."""
    known = list(splits)
    # Other names must be spelled like in the data set.
    split = split_of(name) if name in ("train", "test") else None
    alike = [
        other
        for other in known
        if other.casefold() == name.casefold() or (split and split_of(other) == split)
    ]
    return alike[0] if name not in known and len(alike) == 1 else name


def _index_columns(folder: Path) -> frozenset[str]:
    """Return the pandas index columns of the Parquet files in a folder."""
    # The package datasets drops pandas' metadata.
    parquet, lib = arrow("parquet"), arrow("lib")
    names = frozenset[str]()
    for path in folder.rglob("*.parquet"):
        try:
            names |= pandas_index(parquet.read_schema(path).metadata)
        except (lib.ArrowException, OSError):
            continue
    return names


def _warn_of_unused(path: Path, splits: Iterable[str]) -> None:
    unused = ", ".join(sorted(splits))
    if unused:
        warn_once(_LOG, f"{path}: the splits {unused} are not used")
