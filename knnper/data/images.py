"""Data sets of image files: folders of classes and of domains; how files are read."""

import contextlib
import hashlib
import io
import logging
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field
from torch import Tensor

from knnper.data.cache import (
    Build,
    Contents,
    EntryWriter,
    Source,
    Split,
    cached_dataset,
    cached_images,
)
from knnper.data.class_folders import (
    UNREADABLE_SUFFIXES,
    FoundFile,
    digest_of_files,
    files_below,
    files_of_users,
    folder_names,
    list_class_folders,
    mixed,
    require_folder,
    suffix_of,
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
from knnper.data.examples import KINDS_OF_INPUT, DataFormat, Dataset
from knnper.data.folders import folders_in, why_no_folder, why_unreachable
from knnper.data.pixel_depth import wide_pixels
from knnper.data.site_data import (
    Collected,
    InputForm,
    Inputs,
    OnError,
    ReadInputs,
    SiteSettings,
    SiteTask,
    place_of,
)
from knnper.data.split_names import is_split_name, refuse_splits, split_folders
from knnper.errors import DataError, warn_once
from knnper.experiment import NonNegativeInt, PositiveInt, alternatives
from knnper.reasons import Code, SafeReason
from knnper.seeding import RandomKey

_LOG = logging.getLogger(__name__)
_MODES = {1: "L", 3: "RGB"}
_MODES_OF_GREY = ("1", "L")
_FORMATS_OF_SEQUENCES = ("GIF", "PNG", "WEBP", "TIFF", "AVIF")
_FILES_PER_TASK = 256
_MAX_THREADS = 16
_MOST_SHOWN = 50

DECODER = f"3, Pillow {PIL.__version__}"
"""What `read_image` makes of a file may be another with another one of these."""

ImageShape: TypeAlias = tuple[int, int, int]
"""(height, width, channels)."""


class Encoded(NamedTuple):
    """An image file's content, and what it is called in errors."""

    name: str
    content: bytes


Picture: TypeAlias = str | Path | Encoded
"""An image that is not decoded yet: a file, or what would be in one."""


def read_image(
    picture: Picture, channels: int, size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """Return one image, uint8 of shape (height, width, channels).

    ``channels`` are 3 for colour or 1 for grey, whatever the file has; it is resized to
    ``size`` (height, width). A `DataError` says that it cannot be decoded.
    """
    with open_image(picture) as image:
        return _pixels_of(image, channels, size)


def _pixels_of(
    image: Image.Image, channels: int, size: tuple[int, int] | None
) -> NDArray[np.uint8]:
    converted = upright(image).convert(_MODES[channels])
    if size is not None:
        resampling = Image.Resampling.BILINEAR
        converted = converted.resize((size[1], size[0]), resampling)
    pixels: NDArray[np.uint8] = np.asarray(converted, dtype=np.uint8)
    return pixels.reshape(converted.height, converted.width, channels)


def upright(image: Image.Image) -> Image.Image:
    """Return an image as people see it: cameras store how they were held, in EXIF."""
    try:
        return ImageOps.exif_transpose(image)
    except (struct.error, KeyError, IndexError, TypeError, AttributeError):
        return image  # What the file says of it is damaged.


@contextlib.contextmanager
def open_image(picture: Picture) -> Iterator[Image.Image]:
    """Open an image, of which nothing is decoded yet."""
    name, file = _name_of(picture), cast("Any", picture)
    if isinstance(picture, Encoded):
        file = io.BytesIO(picture.content)
    # To open a named pipe would wait for what is written to it.
    elif unreachable := why_unreachable(name):
        raise DataError(
            f"{name} cannot be read as an image: it {unreachable}; remove or mend it"
        )
    try:
        with Image.open(file) as image:
            wide = wide_pixels(image)
            if wide is not None:
                raise DataError(
                    f"{name}: found {wide} pixels (mode {image.mode}), expected "
                    "8-bit; scale them to 0-255 and save them again"
                )
            yield image
    except DataError:
        raise
    # Decoders raise errors of many types for files that are damaged or too new.
    except Exception as error:
        # Pillow would name the file again.
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = _why_unknown(name) if is_unknown else error or type(error).__name__
        raise DataError(
            f"{name} cannot be read as an image: {reason}; remove or mend it"
        ) from error


def _why_unknown(name: str) -> str:
    suffix = suffix_of(name)
    if suffix in UNREADABLE_SUFFIXES:
        return f"Pillow reads no {suffix}, unlike PNG and JPEG"
    return "it is none, damaged, or of a kind that Pillow does not read"


def decode_files(
    pictures: Sequence[Picture], images: NDArray[np.uint8], like: str | None = None
) -> dict[int, str]:
    """Fill ``images`` with the pixels of n files; return, by position, why not some.

    ``images``, shape (n, height, width, channels), are on disc or in memory. All must
    have the size of the file that is called ``like``; without, all are resized.
    """
    height, width, channels = images.shape[1:]
    failed: dict[int, str] = {}
    others: dict[int, str] = {}
    sequences: list[str] = []

    def decode_from(start: int) -> None:
        for at in range(start, min(start + _FILES_PER_TASK, len(pictures))):
            try:
                size = (height, width) if like is None else None
                with open_image(pictures[at]) as image:
                    pixels = _pixels_of(image, channels, size)
                    if _is_sequence(image):
                        sequences.append(_name_of(pictures[at]))
            except DataError as error:
                failed[at] = str(error)
                continue
            if pixels.shape == images.shape[1:]:
                images[at] = pixels
                continue
            others[at] = (
                f"images differ in size: {like} is {width}x{height} but "
                f"{_name_of(pictures[at])} is {pixels.shape[1]}x{pixels.shape[0]} "
                "(width x height); set data.image_size to resize all to one size"
            )

    # Threads, since Pillow lets go of the interpreter's lock.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
        starts = range(0, len(pictures), _FILES_PER_TASK)
        deque(pool.map(decode_from, starts), maxlen=0)
    if sequences:
        _LOG.warning(
            "%d of %d files hold several images, as frames or pages, such as %s: only "
            "the first of each is read",
            len(sequences),
            len(pictures),
            min(sequences),
        )
    if others:
        # They can be read: what is to be mended is the settings.
        require_all_read(why for _, why in sorted({**failed, **others}.items()))
    return dict(sorted(failed.items()))


def _is_sequence(image: Image.Image) -> bool:
    """Return whether a file holds several images; a camera's preview does not count."""
    is_kind = image.format in _FORMATS_OF_SEQUENCES
    return is_kind and bool(getattr(image, "is_animated", False))


def _name_of(picture: Picture) -> str:
    return picture.name if isinstance(picture, Encoded) else str(picture)


def require_all_read(failed: Iterable[str]) -> None:
    """Raise a `DataError` with the first reasons why examples could not be read."""
    reasons = list(failed)
    if len(reasons) == 1:
        raise DataError(
            reasons[0], reason=SafeReason(Code.UNREADABLE_EXAMPLES, count=1)
        )
    if reasons:
        left = len(reasons) - _MOST_SHOWN
        lines = reasons[:_MOST_SHOWN] + ([f"and {left} more"] if left > 0 else [])
        raise DataError(
            f"{len(reasons)} examples cannot be read:\n"
            + "\n".join(f"  - {line}" for line in lines),
            reason=SafeReason(Code.UNREADABLE_EXAMPLES, count=len(reasons)),
        )


def decoded(paths: Sequence[Path], image_shape: ImageShape) -> Tensor:
    """Return images, uint8 of shape (n, *image_shape), all of which can be read."""
    images = _room_for(len(paths), image_shape, str(paths[0]))
    require_all_read(decode_files(list(map(str, paths)), images).values())
    return torch.from_numpy(images)


def _room_for(count: int, image_shape: ImageShape, path: str) -> NDArray[np.uint8]:
    if image_shape[2] not in _MODES:
        shape = " x ".join(map(str, image_shape))
        raise DataError(
            f"{path}: image files have 1 or 3 channels, but inputs of the shape "
            f"{shape} are expected; give an .npz file",
            reason=SafeReason(Code.WRONG_KIND),
        )
    return np.empty((count, *image_shape), dtype=np.uint8)


def digests_of(images: NDArray[np.generic]) -> list[bytes]:
    """Return a digest of each of n inputs: equal inputs have equal ones."""
    return [
        hashlib.blake2b(np.ascontiguousarray(one).data, digest_size=16).digest()
        for one in images
    ]


def write_images(
    writer: EntryWriter,
    pictures: Mapping[Split, Sequence[Picture]],
    image_size: int | None,
    channels: int,
) -> dict[Split, dict[int, str]]:
    """Decode the files of each split, in their order; ``train`` has one at least.

    Returns, by split and position, why some cannot be read.
    """
    like, width, height = None, image_size or 0, image_size or 0
    if image_size is None:
        like, (width, height) = _first_size(pictures["train"])
    digests: dict[Split, list[bytes]] = {}
    failed: dict[Split, dict[int, str]] = {}
    for split, files in pictures.items():
        images = writer.new_images(split, (len(files), height, width, channels))
        failed[split] = decode_files(files, images, like)
        found = enumerate(digests_of(images))
        digests[split] = [one for at, one in found if at not in failed[split]]
    trained_on = set(digests["train"])
    num_copies = sum(one in trained_on for one in digests["test"])
    if num_copies:
        _LOG.warning(
            "%d of %d test images are copies of training images, in every pixel: "
            "accuracies will be measured too high; remove the copies from one of the "
            "two",
            num_copies,
            len(digests["test"]),
        )
    return failed


def _first_size(pictures: Sequence[Picture]) -> tuple[str, tuple[int, int]]:
    """Return name, and width and height, of the first image that can be opened."""
    reasons = []
    for picture in pictures:
        try:
            with open_image(picture) as image:
                return _name_of(picture), upright(image).size
        except DataError as error:
            reasons.append(str(error))
    require_all_read(reasons)
    raise DataError("there are no train images; at least one is needed")


@dataclass(frozen=True, kw_only=True)
class DecodedSettings(DataFormat):
    """What image files are decoded to.

    Attributes
    ----------
    image_size
        Height and width that every image is resized to, in pixels; null keeps the
        size, which must then be the same for all.
    channels
        3 for colour, 1 for grey.
    on_error
        Images that cannot be read: ``refuse`` lists them all in an error, ``skip``
        leaves them out and says how many they are.
    """

    later: ClassVar[tuple[str, ...]] = ("on_error",)

    image_size: PositiveInt | None = None
    channels: Literal[1, 3] = 3
    on_error: OnError = "refuse"

    def decoded(
        self,
        source: Source,
        files: Mapping[Split, Sequence[Picture]],
        describe: Callable[[EntryWriter], Contents],
    ) -> Dataset:
        """Return the data set; ``describe`` stores what is known of the images."""
        return self.cached(source, lambda one: self.written(one, files, describe))

    def written(
        self,
        writer: EntryWriter,
        files: Mapping[Split, Sequence[Picture]],
        describe: Callable[[EntryWriter], Contents],
    ) -> Contents:
        """Decode the images into an entry of the cache; see `decoded`."""
        failed = write_images(writer, files, self.image_size, self.channels)
        reasons = [why for part in failed.values() for why in part.values()]
        if self.on_error == "refuse":
            require_all_read(reasons)
        contents = describe(writer)
        for split, part in failed.items():
            if part:
                writer.drop(split, part)
        return replace(contents, num_skipped=len(reasons))

    def cached(self, source: Source, build: Build) -> Dataset:
        """Return the data set of which ``build`` makes an entry of the cache."""
        form: dict[str, str | int | None] = {
            "decoder": DECODER,
            "image_size": self.image_size,
            "channels": self.channels,
        }
        if self.on_error != "refuse":
            form["on_error"] = self.on_error
        return cached_dataset(self.name, {**source, **form}, build)


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


_DOMAIN_LAYOUT = "DOMAIN/CLASS/FILE"
_RENAME = "and read them with data.name: image_folder; rename domains and classes"


@dataclass(frozen=True)
class DomainFolderSettings(DecodedSettings):
    """Where the images are, and how many are test images.

    Attributes
    ----------
    root
        The folder that holds one folder per domain, each with one folder per class.
    test_fraction
        Part of each domain that is tested on, (0, 1), about: the same number of images
        of every class, but at most half of those that a class has. 0.15 in
        Chen et al. 2023, section 5.
    seed
        Of the choice of these images.
    """

    name = "domain_folder"
    title = "Domain folder"
    summary = "your own images of several domains: ROOT/DOMAIN/CLASS/FILE"

    root: str
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Return the images below ``root`` with the domain that each is from."""
        root = Path(self.root).expanduser().absolute()
        domains = folder_names(root, _DOMAIN_LAYOUT, "domain")
        if not domains:
            raise DataError(
                f"{root} holds no domains; data.root must hold {_DOMAIN_LAYOUT}"
            )
        for name in domains:
            if is_split_name(name):
                raise DataError(
                    f"{root / name}: found the name of a split, expected that of a "
                    "domain; rename the folder, or read train/CLASS/FILE and "
                    "test/CLASS/FILE with data.name: image_folder"
                )
        refuse_splits(root, domains, _RENAME)
        files = [files_below(root, name, _DOMAIN_LAYOUT) for name in domains]
        class_names = tuple(sorted({one.class_name for part in files for one in part}))
        refuse_splits(root, class_names, _RENAME)
        everything = [file for part in files for file in part]
        if self.on_error == "skip":
            warn_of_unread(root, everything)
        images = self._divided(dict(zip(domains, files, strict=True)))
        if not images["test"]:
            raise DataError(
                f"{root}: there are no images to test on, since data.test_fraction "
                "takes at most half of a class; some domain needs two images of a class"
            )
        source: Source = {
            "files": digest_of_files(class_names, everything),
            "test_fraction": self.test_fraction,
            "seed": self.seed,
        }

        def describe(writer: EntryWriter) -> Contents:
            for split, part in images.items():
                classes = (file.class_name for _, file in part)
                writer.put_labels(split, numbered(classes, class_names))
                writer.put_domain_ids(split, [domain for domain, _ in part])
            return Contents(class_names, domain_names=domains)

        paths = {
            split: [f"{root}/{file.name}" for _, file in part]
            for split, part in images.items()
        }
        return self.decoded(source, paths, describe)

    def _divided(
        self, files: Mapping[str, Sequence[FoundFile]]
    ) -> dict[Split, list[tuple[int, FoundFile]]]:
        """Return the files of each split, each with the position of its domain."""
        key = RandomKey(self.seed).child("domain test")
        images: dict[Split, list[tuple[int, FoundFile]]] = {"train": [], "test": []}
        for domain, (name, part) in enumerate(files.items()):
            kinds = [file.class_name for file in part]
            tested = balanced_part(kinds, self.test_fraction, key.child(name))
            for file, is_test in zip(part, tested, strict=True):
                images["test" if is_test else "train"].append((domain, file))
        return images


def balanced_part(
    kinds: Sequence[str], fraction: float, key: RandomKey
) -> NDArray[np.bool_]:
    """Choose about a part of n images, of each kind the same number, shape (n,).

    ``kinds`` are what the images are. The ``fraction``, (0, 1), is shared out among the
    kinds: the nearest whole number of each, one at least, but of no kind more than
    half. The choice within a kind does not depend on the others' names.
    """
    found, kind_of = np.unique(np.asarray(kinds), return_inverse=True)
    wanted = max(1, int(fraction * len(kinds) / len(found) + 0.5))
    chosen = np.zeros(len(kinds), dtype=np.bool_)
    for number, kind in enumerate(found.tolist()):
        places = key.child(kind).numpy().permutation(np.flatnonzero(kind_of == number))
        chosen[places[: min(wanted, len(places) // 2)]] = True
    return chosen


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


@dataclass(frozen=True, eq=False)
class ImageFiles(Inputs):
    """Inputs as the image files ``names`` in the folder ``root``."""

    root: Path
    names: tuple[str, ...]

    def form(self) -> InputForm:
        """Return size and channels of the first image that can be opened."""
        reasons = []
        for name in self.names:
            try:
                with open_image(self.root / name) as image:
                    channels = 1 if image.mode in _MODES_OF_GREY else 3
                    image = upright(image)
                    return (image.height, image.width, channels), "uint8"
            except DataError as error:
                reasons.append(str(error))
        require_all_read(reasons)
        raise DataError(f"{self.root} holds no images; at least one is needed")

    def read(
        self, positions: Sequence[int], task: SiteTask, cache: Path | None = None
    ) -> ReadInputs:
        """Bring each image to the task's size and channels."""
        paths = [f"{self.root}/{name}" for name in self.names]
        shape = task.spec.image_shape
        if task.spec.dtype != "uint8":
            raise DataError(
                f"{paths[0]} is an image, but the federation agreed on "
                f"{KINDS_OF_INPUT[task.spec.dtype]}; give a table or an .npz file",
                reason=SafeReason(Code.WRONG_KIND),
            )

        def decode() -> tuple[NDArray[np.uint8], Mapping[int, str]]:
            room = _room_for(len(positions), shape, paths[0])
            failed = decode_files([paths[at] for at in positions], room)
            good = [row for row in range(len(room)) if row not in failed]
            reasons = {positions[row]: why for row, why in failed.items()}
            return (room[good] if failed else room), reasons

        if cache is None:
            images, failed = decode()
        else:
            form = (DECODER, shape, list(positions))
            room = (len(positions), *shape)
            images, failed = cached_images(cache, paths, form, room, decode)
        return ReadInputs(torch.from_numpy(images), failed)
