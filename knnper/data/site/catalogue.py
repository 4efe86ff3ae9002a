"""All kinds of own data that a site can name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from knnper.config.sections import Choice, Settings
from knnper.data.site.agreement import SiteTask
from knnper.data.site.collected import Collected, SiteSettings
from knnper.data.site.image_folder import (
    SiteImageFolderSettings,
    collect_image_folder,
)
from knnper.data.site.npz import NpzSettings, collect_npz
from knnper.data.site.opening import own_task, require_readable, settle
from knnper.data.site.python_entry import PythonSettings, collect_python
from knnper.data.site.site_data import SiteData
from knnper.data.site.table import SiteTableSettings, collect_table
from knnper.data.site.text import SiteTextSettings, collect_text


@dataclass(frozen=True)
class SiteDataSpec:
    """A kind of own data that can be chosen by name.

    Attributes
    ----------
    title, summary
        For people.
    settings_type
        The dataclass of its settings.
    collect
        Takes an instance of ``settings_type``, the folder that relative paths are
        relative to, and the task, where one is known.
    """

    title: str
    summary: str
    settings_type: type[SiteSettings]
    collect: Callable[[Any, Path, SiteTask | None], Collected]

    def survey(
        self, settings: SiteSettings, base: Path, task: SiteTask | None
    ) -> SiteData:
        """Return the data; what cannot be read is left out and named.

        Parameters
        ----------
        settings
            Of `settings_type`.
        base
            The folder that relative paths are relative to.
        task
            What the federation agreed on; None takes it from the data.

        Raises
        ------
        DataError
            If there is no data, it is laid out otherwise, or labels are unknown.
        """
        found = self.collect(settings, base, task)
        return settle(found, settings, own_task(found) if task is None else task)

    def open(
        self,
        settings: SiteSettings,
        base: Path,
        task: SiteTask,
        cache: Path | None = None,
    ) -> SiteData:
        """Return the data, all of which can be read; see `survey`.

        Parameters
        ----------
        settings, base, task
            See `survey`.
        cache
            A folder for what takes long to read, so that it is read only once as long
            as it does not change: decoded image files. Arrays and tables are read each
            time, and functions are called each time, as their results may depend on
            anything; one that takes long can keep them itself.

        Raises
        ------
        DataError
            As `survey`, and with all inputs that cannot be read.
        """
        found = self.collect(settings, base, task)
        if cache is not None:
            found = replace(found, inputs=found.inputs.kept_in(cache))
        return require_readable(settle(found, settings, task))


SITE_DATA: Mapping[str, SiteDataSpec] = MappingProxyType(
    {
        "image_folder": SiteDataSpec(
            "Image folder",
            "image files: PATH/CLASS/FILE, or PATH/train/CLASS/FILE and so on",
            SiteImageFolderSettings,
            collect_image_folder,
        ),
        "npz": SiteDataSpec(
            "NPZ file",
            "arrays inputs and labels, or train_inputs, train_labels, ...",
            NpzSettings,
            collect_npz,
        ),
        "table": SiteDataSpec(
            "Table",
            "a CSV or Parquet file: a row an example, a column a feature",
            SiteTableSettings,
            collect_table,
        ),
        "text": SiteDataSpec(
            "Text",
            "plain text: a window of characters, and the one that follows",
            SiteTextSettings,
            collect_text,
        ),
        "python": SiteDataSpec(
            "Python function",
            "your own code: module:function, beside the client's file or installed",
            PythonSettings,
            collect_python,
        ),
    }
)


def open_site(
    choice: Choice[Settings], base: Path, task: SiteTask, cache: Path | None = None
) -> SiteData:
    """Return the data that was chosen by name; see `SiteDataSpec.open`."""
    spec, settings = _chosen(choice)
    return spec.open(settings, base, task, cache)


def survey_site(
    choice: Choice[Settings], base: Path, task: SiteTask | None
) -> SiteData:
    """Return the data that was chosen by name; see `SiteDataSpec.survey`."""
    spec, settings = _chosen(choice)
    return spec.survey(settings, base, task)


def _chosen(choice: Choice[Settings]) -> tuple[SiteDataSpec, SiteSettings]:
    spec, settings = SITE_DATA[choice.name], choice.settings
    if not isinstance(settings, spec.settings_type):
        raise TypeError(
            f"{choice.name} takes {spec.settings_type.__name__}, "
            f"found {type(settings).__name__}"
        )
    return spec, settings
