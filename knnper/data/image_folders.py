"""Image files in folders of classes, for simulations and sites."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from knnper.data.cache import Contents, EntryWriter, Source, Split
from knnper.data.class_folders import (
    FoundFile,
    digest_of_files,
    files_of_users,
    folder_names,
    list_class_folders,
    mixed,
    require_folder,
    warn_of_merged_folders,
    warn_of_unread,
)
from knnper.data.dividing import (
    SPLITS,
    clean_names,
    mark_by_group,
    numbered,
    require_known,
    warn_of_merged,
)
from knnper.data.dividing import Split as SiteSplit
from knnper.data.examples import Dataset
from knnper.data.folders import folders_in, why_no_folder
from knnper.data.images import DecodedSettings, ImageFiles
from knnper.data.site_data import Collected, SiteSettings, SiteTask, place_of
from knnper.data.split_names import refuse_splits, split_folders
from knnper.errors import DataError, warn_once
from knnper.experiment import NonNegativeInt, alternatives
from knnper.reasons import Code, SafeReason

_LOG = logging.getLogger(__name__)
_SPLITS: tuple[Split, ...] = ("train", "test")
_LAYOUT = "CLASS/FILE, or train/CLASS/FILE and test/CLASS/FILE"
_NO_SPLITS = "or set data.layout: classes if they are classes or clients"


@dataclass(frozen=True)
class ImageFolderSettings(DecodedSettings):
    """Where the images are.

    Attributes
    ----------
    root
        The folder that holds one folder per class; or ``train`` and ``test``, each with
        one folder per class. Instead of these, there may be one folder for each client,
        with folders of classes in it. The partition ``natural`` needs clients. A folder
        ``val`` beside ``train`` and ``test`` is added to the training data.
    client_separator
        Where file names begin with the name of the client whose image it is, the text
        that ends this name: "_" for ``f0123_17.png``.
    layout
        ``auto`` takes a folder ``train`` for a split, and so names such as ``Training``
        beside ``Testing``. ``classes`` takes all of them for classes (or clients).
    test_fraction
        Part of the images that is tested on where there are no splits, (0, 1), rounded:
        of each class, or else of each client, of all of its classes alike. One image of
        each is left to train on.
    seed
        Of the choice of these images, which depends on their names beside.
    """

    name = "image_folder"
    title = "Image folder"
    summary = "your own images: ROOT/CLASS/FILE, ROOT/train/CLASS/FILE, by user or not"
    later = (*DecodedSettings.later, "layout", "test_fraction", "seed")

    root: str
    client_separator: Annotated[str, Field(min_length=1)] | None = None
    layout: Literal["auto", "classes"] = "auto"
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Return the images below ``root``; the classes are those of training images.

        A `DataError` says what is wrong with the folders.
        """
        root = Path(self.root).expanduser().absolute()
        source: Source = {"client_separator": self.client_separator}
        require_folder(root, _LAYOUT)
        folders = self._split_folders(root)
        if folders:
            files = self._given(root, folders)
        else:
            files = self._divided(files_of_users(root, "", _LAYOUT), root)
            source = {**source, "fraction": self.test_fraction, "seed": self.seed}
        trained = root / folders["train"] if folders else root
        class_names = self._class_names(files, trained)
        everything = [*files["train"], *files["test"]]
        warn_of_merged_folders(root, everything)
        if self.on_error == "skip":
            warn_of_unread(root, everything)
        source = {**source, "files": digest_of_files(class_names, everything)}
        paths = {
            split: [f"{root}/{one.name}" for one in files[split]] for split in files
        }
        owners = self._owners(files)
        names = tuple(sorted({name for part in owners.values() for name in part}))

        def describe(writer: EntryWriter) -> Contents:
            for split, part in files.items():
                classes = (file.class_name for file in part)
                writer.put_labels(split, numbered(classes, class_names))
                if names:
                    writer.put_client_ids(split, numbered(owners[split], names))
            return Contents(class_names, client_names=names)

        return self.decoded(source, paths, describe)

    def _split_folders(self, root: Path) -> Mapping[SiteSplit, str]:
        """Return the folders of train, test and validation; none where there are none.

        Other folders beside them are named in a warning.
        """
        if self.layout == "classes":
            return {}
        names = folders_in(root)
        folders = split_folders(root, names, _NO_SPLITS)
        missing = [split for split in _SPLITS if split not in folders]
        if folders and missing:
            raise DataError(
                f"{root / missing[0]} is not a folder, and {root} holds "
                f"{', '.join(folders.values())}; data.root must hold {_LAYOUT}. If "
                "these are no splits, set data.layout: classes"
            )
        others = sorted(set(names) - set(folders.values())) if folders else []
        if others:
            warn_once(
                _LOG,
                f"{root}: found {', '.join(others)} beside the splits "
                f"{', '.join(folders.values())}; no image in them is read",
            )
        return folders

    def _given(
        self, root: Path, folders: Mapping[SiteSplit, str]
    ) -> dict[Split, list[FoundFile]]:
        """Return the files of each split, those for validation among the training's."""
        files = {
            split: files_of_users(root, folders[split], _LAYOUT) for split in _SPLITS
        }
        if "validation" in folders:
            held_out = files_of_users(root, folders["validation"], _LAYOUT)
            files["train"] += held_out
            warn_once(
                _LOG,
                f"{root}: the {len(held_out)} images in {folders['validation']} are "
                "added to the training data; each client holds out a part of its own "
                "for validation",
            )
        return files

    def _divided(
        self, found: Sequence[FoundFile], root: Path
    ) -> dict[Split, list[FoundFile]]:
        """Return the files of each split: a part of each client, or of each class."""
        kinds = [one.class_name for one in found]
        groups = [one.class_name if one.user is None else one.user for one in found]
        names = [one.name for one in found]
        marks = mark_by_group(groups, names, kinds, self.test_fraction, self.seed)
        files: dict[Split, list[FoundFile]] = {"train": [], "test": []}
        for file, is_test in zip(found, marks, strict=True):
            files["test" if is_test else "train"].append(file)
        if not files["test"]:
            raise DataError(
                f"{root}: there are no images to test on; raise data.test_fraction, of "
                "which a class's (or client's) only image is never taken"
            )
        return files

    def _class_names(
        self, files: Mapping[Split, Sequence[FoundFile]], trained: Path
    ) -> tuple[str, ...]:
        """Return the classes of training images, in whose folders there are some."""
        class_names = tuple(sorted({one.class_name for one in files["train"]}))
        if self.layout == "auto":
            refuse_splits(trained, class_names, _NO_SPLITS)
        if files["train"][0].user is None:
            names = clean_names(folder_names(trained, _LAYOUT))
            empty = sorted(set(names) - set(class_names))
            if empty:
                raise DataError(
                    f"{trained} holds no images of the classes {', '.join(empty)}, "
                    "expected one at least of each; add some, or remove these folders"
                )
        tested = (one.class_name for one in files["test"])
        require_known(tested, class_names, str(trained.parent / "test"))
        return class_names

    def _owners(
        self, files: Mapping[Split, Sequence[FoundFile]]
    ) -> dict[Split, list[str]]:
        """Return the client of each image; nothing where the data names none."""
        separator = self.client_separator
        has_users = files["train"][0].user is not None
        for file in (*files["train"], *files["test"]):
            if (file.user is not None) != has_users:
                raise DataError(
                    f"found {files['train'][0].name} and {file.name}; expected "
                    "folders of clients in all splits, or in none of them"
                )
        if has_users and separator is not None:
            raise DataError(
                "found folders of clients below data.root and data.client_separator "
                f"{separator!r}, expected one of the two; set the latter to null"
            )
        if separator is None:
            return {
                split: [str(one.user) for one in part] if has_users else []
                for split, part in files.items()
            }
        owners: dict[Split, list[str]] = {}
        for split, part in files.items():
            pieces = [(one, Path(one.name).name.partition(separator)) for one in part]
            for one, (owner, found, _) in pieces:
                if not found or not owner:
                    raise DataError(
                        f"the name of {one.name} does not begin with a client's name "
                        f"and {separator!r}; rename it, or set data.client_separator "
                        "to null"
                    )
            owners[split] = [owner for _, (owner, _, _) in pieces]
        written = [owner for part in owners.values() for owner in part]
        warn_of_merged(written, "clients", "data.root")
        return {split: list(clean_names(part)) for split, part in owners.items()}


@dataclass(frozen=True)
class SiteImageFolderSettings(SiteSettings):
    """Where the images are.

    Attributes
    ----------
    path
        The folder, with one folder of images for each class; or with the folders
        ``train``, and ``validation`` and ``test`` where there are any, of which each
        has one folder for each class.
    layout
        ``auto`` takes a folder ``train`` for a split, and so names such as ``Training``
        beside ``val``. ``classes`` takes all of them for classes.
    """

    name = "image_folder"
    title = "Image folder"
    summary = "image files: PATH/CLASS/FILE, or PATH/train/CLASS/FILE and so on"

    path: str
    layout: Literal["auto", "classes"] = "auto"

    def collect(self, base: Path, task: SiteTask | None) -> Collected:  # noqa: ARG002
        """Return the images in a folder; their names are their paths in it."""
        root = place_of(base, self.path)
        if reason := why_no_folder(root):
            raise DataError(
                f"{root} {reason}; expected PATH/CLASS/IMAGE, or PATH/train/CLASS/"
                "IMAGE and so on",
                reason=SafeReason(Code.MISSING_FILE),
            )
        split_in = self._split_folders(root)
        folders = {
            f"{folder}/" if folder else "": list_class_folders(root / folder)
            for folder in split_in or ("",)
        }
        class_of = {
            f"{prefix}{name}": class_name
            for prefix, found in folders.items()
            for name, class_name in found.class_of.items()
        }
        names = tuple(mixed(class_of))
        splits = None
        if split_in:
            splits = tuple(split_in[name.partition("/")[0]] for name in names)
        return Collected(
            source=str(root),
            names=names,
            labels=tuple(class_of[name] for name in names),
            inputs=ImageFiles(root, names),
            splits=splits,
            given_splits=frozenset(split_in.values()),
            num_ignored=sum(found.num_ignored for found in folders.values()),
            warnings=tuple(
                warning for found in folders.values() for warning in found.warnings
            ),
        )

    def _split_folders(self, root: Path) -> dict[str, SiteSplit]:
        """Return the split of each folder in ``root``; none where these are classes."""
        if self.layout == "classes":
            return {}
        names = folders_in(root)
        folders = split_folders(root, names, _NO_SPLITS)
        if "train" not in folders:
            return {}
        for name in names:
            if name not in folders.values():
                raise DataError(
                    f"{root / name}: found beside the folder {folders['train']}, "
                    f"expected a split; {alternatives(name, SPLITS)}. If "
                    f"{folders['train']} is a class, set data.layout: classes",
                    reason=SafeReason(Code.WRONG_LAYOUT),
                )
        return {folder: split for split, folder in folders.items()}
