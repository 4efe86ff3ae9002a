"""Data sets of Hugging Face: folders of the package datasets, or from the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnper.data.cache import cache_root, hub_folder, state_of_files
from knnper.data.columns import (
    ColumnSettings,
    TableFile,
    Wanted,
    columns_of,
    number_columns,
)
from knnper.data.folders import why_unreachable
from knnper.errors import DataError
from knnper.experiment import alternatives
from knnper.process import import_extra

_OF_DISK = ("dataset_dict.json", "state.json")  # what `save_to_disk` writes beside


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSettings(ColumnSettings):
    """Which data set, and what its columns mean.

    Attributes
    ----------
    path
        A folder that ``save_to_disk`` wrote, or whose files ``load_dataset`` reads; or
        a data set's name on the Hugging Face Hub.
    config
        Which of several data sets in it; null is its default.
    train
        The split that is trained on.
    test
        The split that is tested on; null is ``test`` where there is one, else
        `test_fraction` of `train`.
    """

    name = "hugging_face"
    title = "Hugging Face"
    summary = "a data set of the package datasets, from a folder or the Hub"

    path: str
    config: str | None = None
    train: str = "train"
    test: str | None = None

    def tables(self, wanted: Wanted) -> tuple[TableFile, TableFile | None]:
        """See `ColumnSettings`."""
        splits, path = self._opened(), self.folder()
        train = self._table(splits, self.train, wanted, path)
        test = self.test or ("test" if "test" in splits else None)
        if test is None or test == self.train:
            return train, None
        same = replace(wanted, numbers=train.number_columns)
        return train, self._table(splits, test, same, path)

    def state(self) -> Mapping[str, str | None]:
        """See `ColumnSettings`."""
        splits = {"config": self.config, "train": self.train, "test": self.test}
        return {"files": state_of_files(self._files(), self.folder()), **splits}

    def _files(self) -> list[Path]:
        """Return all files below the folder; refuse links that lead nowhere."""
        paths = sorted(self.folder().rglob("*"))
        for path in paths:
            # The package datasets would pass over it without a warning.
            if reason := why_unreachable(str(path)):
                raise DataError(f"{path} {reason}; mount or remove it")
        return [path for path in paths if path.is_file()]

    def folder(self) -> Path:
        """See `ColumnSettings`."""
        return hub_folder(
            self.path, download=self.download, extra="hf", repo_type="dataset"
        )

    def _opened(self) -> Any:
        """Return the splits by name, each a `datasets.Dataset`."""
        package = import_extra("datasets", "hf", "a data set of Hugging Face")
        folder = self.folder()
        self._files()
        try:
            if any((folder / name).is_file() for name in _OF_DISK):
                found = package.load_from_disk(str(folder))
            else:
                made = cache_root() / "hugging_face"
                package.disable_progress_bars()
                found = package.load_dataset(
                    str(folder), self.config, cache_dir=str(made)
                )
        # Whatever a damaged file makes the package, and those below it, raise.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise DataError(
                f"{folder} cannot be read as a data set of Hugging Face: {reason}; "
                "expected what save_to_disk wrote, or files that load_dataset reads"
            ) from error
        return found if isinstance(found, Mapping) else {self.train: found}

    def _table(self, splits: Any, split: str, wanted: Wanted, path: Path) -> TableFile:
        if split not in splits:
            raise DataError(
                f"{path} has no split {split!r}; {alternatives(split, splits)}"
            )
        found, place = splits[split], path / split
        numbers = number_columns(found.features.arrow_schema, wanted, place)
        columns = [*wanted.as_they_are, *numbers]
        table = found.select_columns(columns).with_format("arrow")[:]
        made = columns_of(table, wanted, numbers, place)
        names = getattr(found.features.get(self.label), "names", None)
        if self.label not in wanted.texts or not names:
            return made
        known = {str(number): name for number, name in enumerate(names)}
        labels = tuple(known.get(one, "") for one in made.texts[self.label])
        texts = {**made.texts, self.label: labels}
        return replace(made, texts=texts, class_names=tuple(names))
