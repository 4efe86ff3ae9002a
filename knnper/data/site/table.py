"""A site's data as a table: a row an example, a column a feature."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from knnper.data.site.agreement import SiteTask
from knnper.data.site.array_inputs import ArrayInputs
from knnper.data.site.arrays import split_texts
from knnper.data.site.collected import Collected, SiteSettings
from knnper.data.site.place import place_of
from knnper.data.table_file import Columns, are_whole_numbers, read_table, row_names


@dataclass(frozen=True)
class SiteTableSettings(SiteSettings):
    """Which file, and what its columns mean.

    Attributes
    ----------
    path
        A CSV file with a header, or a Parquet file.
    label
        The column of labels: names of classes, or whole numbers.
    features
        The columns of features in the federation's order; null is those that the
        federation agreed on by name or, where it did not, all other columns.
    id
        The column of the examples' names; null names them by their row.
    split
        The column that says train, validation or test; null splits by `fractions`.
    delimiter
        Between the columns of a CSV file.
    """

    path: str
    label: str
    features: tuple[str, ...] | None = None
    id: str | None = None
    split: str | None = None
    delimiter: Annotated[str, Field(min_length=1)] = ","


def collect_table(
    settings: SiteTableSettings, base: Path, task: SiteTask | None
) -> Collected:
    """Return the examples in a table.

    A row without a name is called by its number from 0, as in ``00012``.

    Raises
    ------
    DataError
        As `read_table`; and if labels are missing, or a split has another name.
    """
    table = read_table(
        place_of(base, settings.path),
        _columns(settings, task),
        settings.delimiter,
    )
    source = str(table.path)
    labels = table.filled_texts(settings.label)
    names = row_names(table) if settings.id is None else table.texts[settings.id]
    splits = None
    if settings.split is not None:
        splits = split_texts(table.texts[settings.split], source)
    return Collected(
        source=source,
        names=names,
        labels=labels,
        inputs=ArrayInputs(source, table.numbers),
        splits=splits,
        given_splits=frozenset(splits or ()),
        numbered=are_whole_numbers(labels),
    )


def _columns(settings: SiteTableSettings, task: SiteTask | None) -> Columns:
    texts = (settings.label, settings.id, settings.split)
    agreed = task.feature_names if task is not None else ()
    return Columns(
        tuple(dict.fromkeys(name for name in texts if name is not None)),
        settings.features if settings.features is not None else agreed or None,
    )
