"""Image files in folders of classes, for simulations and sites."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from knnper.data.cache import (
    CENTRAL_SPLITS,
    CentralSplit,
    DatasetContents,
    EntryWriter,
    Source,
)
from knnper.data.class_folders import (
    ListedFile,
    digest_of_files,
    files_of_users,
    folder_names,
    list_class_folders,
    require_folder,
    shuffle_by_hash,
    warn_of_merged_folders,
    warn_of_unread,
)
from knnper.data.dividing import (
    SPLITS,
    Split,
    clean_names,
    mark_by_group,
    numbered,
    require_known,
    warn_of_merged,
)
from knnper.data.examples import Dataset
from knnper.data.folders import folders_in, no_folder_reason
from knnper.data.images import ImageFiles, ImageSettings
from knnper.data.site_data import CollectedExamples, SiteSettings, place_of
from knnper.data.site_task import SiteTask
from knnper.data.split_names import refuse_splits, split_folders
from knnper.errors import DataError, warn_once
from knnper.reasons import Code, SafeReason
from knnper.settings import NonNegativeInt, alternatives

_LOG = logging.getLogger(__name__)
_LAYOUT = "CLASS/FILE, or train/CLASS/FILE and test/CLASS/FILE"
_NO_SPLITS = "or set data.layout: classes if they are classes or clients"


@dataclass(frozen=True)
class ImageFolderSettings(ImageSettings):
    """Settings of an image folder.

    Attributes
    ----------
    root
        A folder with one folder per class, or with ``train`` and ``test``, each with
        one folder per class. In place of the classes there may be one folder per
        client, with folders of classes in it; the partition ``natural`` needs clients.
        A folder ``val`` beside ``train`` and ``test`` is added to the training data.
    client_separator
        Text after the client's name at the beginning of file names, such as "_" for
        ``f0123_17.png``; null if file names contain no client.
    layout
        ``auto`` treats folders named ``train`` or, beside others, ``Training`` as
        splits. ``classes`` treats all folders as classes (or clients).
    test_fraction
        Fraction of test images without folders of splits, (0, 1): of each class, or of
        each client, spread evenly over its classes. At least one image of each is left
        for training.
    seed
        Seed of the choice of test images, which also depends on their names.
    """

    name = "image_folder"
    title = "Image folder"
    summary = "your own images: ROOT/CLASS/FILE, ROOT/train/CLASS/FILE, by user or not"

    root: str
    client_separator: Annotated[str, Field(min_length=1)] | None = None
    layout: Literal["auto", "classes"] = "auto"
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Load the images below ``root``; the classes are those of the training images.

        Raises a `DataError` if the folders do not have the expected layout.
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
            split: [f"{root}/{file.name}" for file in files[split]] for split in files
        }
        owners = self._owners(files)
        names = tuple(sorted({name for part in owners.values() for name in part}))

        def describe(writer: EntryWriter) -> DatasetContents:
            for split, part in files.items():
                classes = (file.class_name for file in part)
                writer.put_labels(split, numbered(classes, class_names))
                if names:
                    writer.put_client_ids(split, numbered(owners[split], names))
            return DatasetContents(class_names, client_names=names)

        return self.load_images(source, paths, describe)

    def _split_folders(self, root: Path) -> Mapping[Split, str]:
        """Return the folders of train, test and validation; empty without splits.

        Logs a warning about other folders beside them.
        """
        if self.layout == "classes":
            return {}
        names = folders_in(root)
        folders = split_folders(root, names, _NO_SPLITS)
        missing = [split for split in CENTRAL_SPLITS if split not in folders]
        if folders and missing:
            raise DataError(
                f"{root / missing[0]} is not a folder, and {root} holds "
                f"{', '.join(folders.values())}; data.root must hold {_LAYOUT}. If "
                "these folders are classes, set data.layout: classes"
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
        self, root: Path, folders: Mapping[Split, str]
    ) -> dict[CentralSplit, list[ListedFile]]:
        """List the files of each split; validation files join the training files."""
        files = {
            split: files_of_users(root, folders[split], _LAYOUT)
            for split in CENTRAL_SPLITS
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
        self, listed: Sequence[ListedFile], root: Path
    ) -> dict[CentralSplit, list[ListedFile]]:
        """Split the files within each client, or within each class."""
        kinds = [file.class_name for file in listed]
        groups = [
            file.class_name if file.user is None else file.user for file in listed
        ]
        names = [file.name for file in listed]
        marks = mark_by_group(groups, names, kinds, self.test_fraction, self.seed)
        files: dict[CentralSplit, list[ListedFile]] = {"train": [], "test": []}
        for file, is_test in zip(listed, marks, strict=True):
            files["test" if is_test else "train"].append(file)
        if not files["test"]:
            raise DataError(
                f"{root}: found no images to test on; raise data.test_fraction (the "
                "only image of a class or client is always used for training)"
            )
        return files

    def _class_names(
        self, files: Mapping[CentralSplit, Sequence[ListedFile]], trained: Path
    ) -> tuple[str, ...]:
        """Return the sorted classes of training images; raise for empty folders."""
        class_names = tuple(sorted({file.class_name for file in files["train"]}))
        if self.layout == "auto":
            refuse_splits(trained, class_names, _NO_SPLITS)
        if files["train"][0].user is None:
            names = clean_names(folder_names(trained, _LAYOUT))
            empty = sorted(set(names) - set(class_names))
            if empty:
                raise DataError(
                    f"{trained} holds no images of the classes {', '.join(empty)}, "
                    "expected at least one of each; add some, or remove these folders"
                )
        tested = (file.class_name for file in files["test"])
        require_known(tested, class_names, str(trained.parent / "test"))
        return class_names

    def _owners(
        self, files: Mapping[CentralSplit, Sequence[ListedFile]]
    ) -> dict[CentralSplit, list[str]]:
        """Return the client of each image; empty lists if the data names no clients."""
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
                f"{separator!r}, expected only one of them; set the latter to null"
            )
        if separator is None:
            return {
                split: [str(file.user) for file in part] if has_users else []
                for split, part in files.items()
            }
        owners: dict[CentralSplit, list[str]] = {split: [] for split in files}
        for split, part in files.items():
            for image in part:
                owner, mark, _ = Path(image.name).name.partition(separator)
                if not owner or not mark:
                    raise DataError(
                        f"the name of {image.name} does not begin with a client's "
                        f"name and {separator!r}; rename it, or set "
                        "data.client_separator to null"
                    )
                owners[split].append(owner)
        written = [owner for part in owners.values() for owner in part]
        warn_of_merged(written, "clients", "data.root")
        return {split: list(clean_names(part)) for split, part in owners.items()}


@dataclass(frozen=True)
class SiteImageFolderSettings(SiteSettings):
    """Settings of an image folder.

    Attributes
    ----------
    path
        A folder with one folder of images per class; or with the folders ``train`` and
        optionally ``validation`` and ``test``, each with one folder per class.
    layout
        ``auto`` treats folders named ``train`` or, beside others, ``Training`` as
        splits. ``classes`` treats all folders as classes.
    """

    name = "image_folder"
    title = "Image folder"
    summary = "image files: PATH/CLASS/FILE, or PATH/train/CLASS/FILE and so on"

    path: str
    layout: Literal["auto", "classes"] = "auto"

    def collect(self, base: Path, task: SiteTask | None) -> CollectedExamples:  # noqa: ARG002
        """List the images in the folder; examples are named by their paths."""
        root = place_of(base, self.path)
        if reason := no_folder_reason(root):
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
            for prefix, listing in folders.items()
            for name, class_name in listing.class_of.items()
        }
        names = tuple(shuffle_by_hash(class_of))
        splits = None
        if split_in:
            splits = tuple(split_in[name.partition("/")[0]] for name in names)
        return CollectedExamples(
            source=str(root),
            names=names,
            labels=tuple(class_of[name] for name in names),
            inputs=ImageFiles(root, names),
            splits=splits,
            given_splits=frozenset(split_in.values()),
            num_ignored=sum(listing.num_ignored for listing in folders.values()),
            warnings=tuple(
                warning for listing in folders.values() for warning in listing.warnings
            ),
        )

    def _split_folders(self, root: Path) -> dict[str, Split]:
        """Return the split of each folder in ``root``; empty if they are classes."""
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
