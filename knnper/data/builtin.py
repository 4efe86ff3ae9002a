"""Data sets with official files, as CIFAR has; scikit-learn's digits."""

import contextlib
import gzip
import hashlib
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.cache import Contents, EntryWriter, Split, cache_root, cached_dataset
from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.errors import DataError
from knnper.experiment import NonNegativeInt, PositiveInt, Settings
from knnper.process import import_torchvision
from knnper.seeding import RandomKey

# Position: fine label in alphabetical order (apple is 0); value: superclass in
# alphabetical order (aquatic_mammals is 0). Krizhevsky (2009); the
# same as `coarse_labels` in the official files.
COARSE_OF: tuple[int, ...] = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11,
    6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
    5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
    16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip


TEST_FRACTION = 0.25  # of each class; scikit-learn ships no official split

_SPLIT_KEY = RandomKey(0, ("digits", "test"))

_LARGEST_VALUE = 16

CLASS_NAMES = tuple(str(digit) for digit in range(10))


@dataclass(frozen=True)
class DigitsSettings(Settings):
    """The data set has no settings."""


def load_digits(settings: DigitsSettings) -> Dataset:  # noqa: ARG001
    """Return the digits, images of shape (8, 8, 1), ten classes.

    The split is the same in every experiment: `TEST_FRACTION` of each class is test
    data. Values 0 ... 16 are scaled to 0 ... 255.
    """
    source = {"test_fraction": TEST_FRACTION, "seed": _SPLIT_KEY.seed}
    return cached_dataset("digits", source, _build)


def digit_images() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all digits, shape (1797, 8, 8, 1), and their labels, shape (1797,)."""
    # Only here: importing scikit-learn takes longer than reading the cache.
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = np.rint(bunch.images * (255 / _LARGEST_VALUE)).astype(np.uint8)
    return images[..., None], bunch.target.astype(np.int64)


def _build(writer: EntryWriter) -> Contents:
    images, labels = digit_images()
    is_test = _test_mask(labels)
    writer.put_images("train", images[~is_test])
    writer.put_labels("train", labels[~is_test])
    writer.put_images("test", images[is_test])
    writer.put_labels("test", labels[is_test])
    return Contents(CLASS_NAMES)


def _test_mask(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark `TEST_FRACTION` of each class, rounded."""
    mask = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        shuffled = (
            _SPLIT_KEY.child(label).numpy().permutation(np.flatnonzero(labels == label))
        )
        mask[shuffled[: round(TEST_FRACTION * len(shuffled))]] = True
    return mask


_Source = IO[bytes] | gzip.GzipFile

_DAMAGED = (EOFError, OSError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


class MissingFilesError(DataError):
    """Some of the files are in none of the places where they may be."""


@dataclass(frozen=True)
class OfficialFiles:
    """The files of a data set that torchvision reads, and how they come.

    Attributes
    ----------
    title
        torchvision's name of the data set.
    folder
        Where torchvision looks for the files, below the root.
    names
        Of the files, unpacked. Packed by itself, each has ``.gz`` at its end.
    downloads
        The names of what is to be downloaded.
    url
        Where from.
    archive
        The one among ``downloads`` that holds all of them; None where each comes by
        itself.
    inside
        The folder that the archive unpacks to, where that is not torchvision's.
    md5
        Of files that are packed by themselves, in hexadecimal, where another data set
        has files of the same name.
    """

    title: str
    folder: str
    names: tuple[str, ...]
    downloads: tuple[str, ...]
    url: str
    archive: str | None = None
    inside: str = ""
    md5: Mapping[str, str] = field(default_factory=dict)

    def places(self, root: Path) -> list[Path]:
        """Return the folders where the files may be, that of torchvision first."""
        folder = Path(self.folder)
        below = [folder, *folder.parents[:-1], Path("raw"), Path()]
        inside = [self.inside] if self.inside else []
        return [root / one / more for one in below for more in ("", *inside)]


@contextlib.contextmanager
def unpacked(files: OfficialFiles, root: Path) -> Iterator[Path]:
    """Yield a root where torchvision finds the files; nothing in ``root`` is changed.

    Parameters
    ----------
    files
        Of a data set.
    root
        The folder that the user named. The files may be in torchvision's place below
        it, in ``raw`` or in itself, packed or not.

    Raises
    ------
    MissingFilesError
        If one is nowhere; with the places, and what to download.
    DataError
        If one is damaged, or that of another data set.
    """
    if all((root / files.folder / name).is_file() for name in files.names):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="knnper-") as made:
        target = Path(made) / files.folder
        target.mkdir(parents=True)
        missing = [name for name in files.names if not _put(name, files, root, target)]
        if missing and files.archive:
            archive = _first(files.places(root), files.archive)
            missing = _extract(archive, missing, target) if archive else missing
        if missing:
            raise MissingFilesError(_told(missing, files, root))
        yield Path(made)


def _first(places: Iterable[Path], name: str) -> Path | None:
    return next((one / name for one in places if (one / name).is_file()), None)


def _put(name: str, files: OfficialFiles, root: Path, target: Path) -> bool:
    """Put a file that lies by itself into a folder; return whether there is one."""
    places = files.places(root)
    found = _first(places, name)
    if found is not None:
        (target / name).symlink_to(found.absolute())
        return True
    packed = _first(places, f"{name}.gz")
    if packed is None:
        return False
    _require_md5(packed, files.md5.get(packed.name))
    try:
        with gzip.open(packed) as source:
            _write(source, target / name)
    except _DAMAGED as error:
        raise DataError(_damaged(packed, error)) from error
    return True


def _require_md5(packed: Path, expected: str | None) -> None:
    if expected is None:
        return
    with packed.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != expected:
        raise DataError(
            f"{packed} is not the official file: expected MD5 {expected}, found "
            f"{found}. Other data sets have files of the same name; download it again, "
            "or unpack it there if you trust it"
        )


def _extract(archive: Path, names: Iterable[str], target: Path) -> list[str]:
    """Unpack files of an archive into a folder; return those that it does not have."""
    missing = set(names)
    try:
        for name, source in _members(archive):
            if name in missing:
                _write(source, target / name)
                missing.remove(name)
    except _DAMAGED as error:
        raise DataError(_damaged(archive, error)) from error
    return [name for name in names if name in missing]


def _members(archive: Path) -> Iterator[tuple[str, _Source]]:
    """Yield the files of an archive by the last part of their names, unpacked."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            for path in zipped.namelist():
                with zipped.open(path) as file:
                    packed = path.endswith(".gz")
                    source = gzip.GzipFile(fileobj=file) if packed else file
                    yield Path(path).name.removesuffix(".gz"), source
        return
    with tarfile.open(archive) as tarred:
        for member in tarred:
            held = tarred.extractfile(member)
            if held is not None:
                yield Path(member.name).name, held


def _write(source: _Source, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file)


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged: {error or type(error).__name__}; download it again"


def _told(missing: Iterable[str], files: OfficialFiles, root: Path) -> str:
    packed = files.archive or "each with .gz at its end"
    return (
        f"{files.title}: {', '.join(missing)} not found, neither unpacked nor packed "
        f"({packed}); looked in {', '.join(map(str, files.places(root)))}. Set "
        f"data.download=true, or download {', '.join(files.downloads)} from "
        f"{files.url} and place what you get in {root} as it is"
    )


_SHARE_OF_CLUSTER = _SHARE_OF_USER = 0.25

_TEST_EXAMPLES_PER_LABEL = 4
"""So many of each label make every probability of D_k a whole number of examples."""


@dataclass(frozen=True)
class SyntheticMixtureSettings(Settings):
    """How many users, and what each has.

    Attributes
    ----------
    num_users
        p, the clients; 100 in the paper.
    num_samples
        m, a user's training and validation examples. The first of them are the same
        for every m.
    num_classes
        d, the labels; 50 in the paper. More than there are clusters.
    num_clusters
        q, the clusters that the users fall into; 4 in the paper.
    seed
        Of the examples.
    """

    num_users: PositiveInt = 100
    num_samples: PositiveInt = 100
    num_classes: Annotated[int, Field(ge=2)] = 50
    num_clusters: PositiveInt = 4
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.num_classes <= self.num_clusters:
            raise ValueError(
                f"found num_classes of {self.num_classes} with num_clusters = "
                f"{self.num_clusters}, expected more classes than clusters; each "
                "cluster has a label of its own, and users have others"
            )


def load_synthetic_mixture(settings: SyntheticMixtureSettings) -> Dataset:
    """Return the users' labels, each with the input 1, shape (1, 1, 1), float32.

    The test split of a user has 4 d examples that are D_k itself: each label as often
    as its probability says. Who has which example is in ``client_ids``, for the
    partition ``natural``.
    """
    users = range(settings.num_users)
    key = RandomKey(settings.seed, ("synthetic_mixture",))
    densities = [density(settings, user) for user in users]
    drawn = [
        _drawn(densities[user], settings.num_samples, key.child(user)) for user in users
    ]
    exact = [_exact(one) for one in densities]
    return Dataset(
        name="synthetic_mixture",
        train=_labelled(drawn),
        test=_labelled(exact),
        spec=InputSpec((1, 1, 1), settings.num_classes, (0.0,), (1.0,), "float32"),
        class_names=tuple(str(label) for label in range(settings.num_classes)),
        feature_names=("constant",),
    )


def density(settings: SyntheticMixtureSettings, user: int) -> NDArray[np.float64]:
    """Return D_k of user k, shape (d,)."""
    num_classes, num_clusters = settings.num_classes, settings.num_clusters
    uniform = 1 - _SHARE_OF_CLUSTER - _SHARE_OF_USER
    shares = np.full(num_classes, uniform / num_classes)
    shares[user % num_clusters] += _SHARE_OF_CLUSTER
    shares[num_clusters + user % (num_classes - num_clusters)] += _SHARE_OF_USER
    return shares


def _drawn(
    shares: NDArray[np.float64], count: int, key: RandomKey
) -> NDArray[np.int64]:
    """Return labels drawn one after the other, shape (count,)."""
    upper = np.cumsum(shares)
    drawn = key.numpy().random(count) * upper[-1]
    labels: NDArray[np.int64] = np.searchsorted(upper, drawn, side="right")
    return labels


def _exact(shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return each label as often as its share says, shape (4 d,)."""
    counts = np.rint(shares * _TEST_EXAMPLES_PER_LABEL * len(shares)).astype(np.int64)
    return np.arange(len(shares), dtype=np.int64).repeat(counts)


def _labelled(of_users: list[NDArray[np.int64]]) -> LabelledArrays:
    labels = np.concatenate(of_users)
    return LabelledArrays(
        images=np.ones((len(labels), 1, 1, 1), dtype=np.float32),
        labels=labels,
        client_ids=np.repeat(np.arange(len(of_users)), list(map(len, of_users))),
    )


@dataclass(frozen=True)
class DownloadSettings(Settings):
    """Where the official files are.

    Attributes
    ----------
    root
        The folder that torchvision keeps the files in; null is ``downloads`` in the
        cache folder.
    download
        Whether the files may be downloaded when they are missing.
    """

    root: str | None = None
    download: bool = False

    def folder(self) -> Path:
        """Return the absolute ``root``."""
        if self.root is None:
            return cache_root() / "downloads"
        return Path(self.root).expanduser().absolute()


@dataclass(frozen=True)
class EmnistSettings(DownloadSettings):
    """Where the official files are, and which of EMNIST's six data sets is meant.

    Attributes
    ----------
    split
        ``balanced`` and ``bymerge`` have 47 classes, ``byclass`` 62, ``letters`` 26,
        ``digits`` and ``mnist`` 10 (Cohen et al., 2017).
    """

    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = (
        "balanced"
    )


def load_cifar10(settings: DownloadSettings) -> Dataset:
    """Return CIFAR-10: 50,000 and 10,000 images of shape (32, 32, 3), ten classes.

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return _load("cifar10", "CIFAR10", settings)


def load_cifar100(settings: DownloadSettings) -> Dataset:
    """Return CIFAR-100 with its 20 coarse labels, images of shape (32, 32, 3).

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return _load("cifar100", "CIFAR100", settings, coarse_of=COARSE_OF)


def load_fashion_mnist(settings: DownloadSettings) -> Dataset:
    """Return Fashion-MNIST: 60,000 and 10,000 images of shape (28, 28, 1).

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return _load("fashion_mnist", "FashionMNIST", settings)


def load_emnist(settings: EmnistSettings) -> Dataset:
    """Return one of EMNIST's data sets, images upright, of shape (28, 28, 1).

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """

    def build(writer: EntryWriter) -> Contents:
        # The official files hold the images mirrored along the diagonal.
        class_names = _write_splits(
            writer,
            "EMNIST",
            settings,
            orient=lambda images: images.transpose(0, 2, 1, 3),
            first_label=1 if settings.split == "letters" else 0,
            split=settings.split,
        )
        return Contents(class_names)

    source = {**_source(settings), "split": settings.split}
    return cached_dataset("emnist", source, build)


def _load(
    name: str,
    class_name: str,
    settings: DownloadSettings,
    coarse_of: tuple[int, ...] | None = None,
) -> Dataset:
    def build(writer: EntryWriter) -> Contents:
        return Contents(_write_splits(writer, class_name, settings), coarse_of)

    return cached_dataset(name, _source(settings), build)


def _source(settings: DownloadSettings) -> dict[str, str]:
    """Name the official files; what they hold never changes."""
    return {"root": str(settings.folder())}


def _write_splits(
    writer: EntryWriter,
    class_name: str,
    settings: DownloadSettings,
    *,
    orient: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] = lambda images: images,
    first_label: int = 0,
    **arguments: str,
) -> tuple[str, ...]:
    """Store both splits of a torchvision data set; return its class names."""
    splits: tuple[Split, ...] = ("train", "test")
    with _readable(class_name, settings, **arguments) as root:
        for split in splits:
            found = _open(class_name, root, train=split == "train", **arguments)
            images = np.asarray(found.data, dtype=np.uint8)
            writer.put_images(split, orient(images.reshape(*images.shape[:3], -1)))
            writer.put_labels(split, np.asarray(found.targets) - first_label)
    return tuple(found.classes[first_label:])


@contextlib.contextmanager
def _readable(
    class_name: str, settings: DownloadSettings, **arguments: str
) -> Iterator[Path]:
    """Yield where torchvision can read; download the files first if that is asked."""
    folder = settings.folder()
    files = _files_of(_type_of(class_name), **arguments)
    with contextlib.ExitStack() as stack:
        try:
            root = stack.enter_context(unpacked(files, folder))
        except MissingFilesError:
            if not settings.download:
                raise
            _open(class_name, folder, train=True, download=True, **arguments)
            root = folder
        yield root


def _files_of(kind: Any, split: str = "") -> OfficialFiles:
    """Return the official files of a data set, as its class in torchvision says."""
    if hasattr(kind, "base_folder"):
        listed = [*kind.train_list, *kind.test_list]
        return OfficialFiles(
            kind.__name__,
            folder=kind.base_folder,
            names=(*(name for name, _ in listed), kind.meta["filename"]),
            downloads=(kind.filename,),
            url=kind.url,
            archive=kind.filename,
        )
    folder = f"{kind.__name__}/raw"
    if split:
        archive = Path(kind.url).name
        names = (
            f"emnist-{split}-{half}-{what}-ubyte"
            for half in ("train", "test")
            for what in ("images-idx3", "labels-idx1")
        )
        return OfficialFiles(
            kind.__name__, folder, tuple(names), (archive,), kind.url, archive, "gzip"
        )
    packed = dict(kind.resources)
    names = (name.removesuffix(".gz") for name in packed)
    return OfficialFiles(
        kind.__name__, folder, tuple(names), (*packed,), kind.mirrors[0], md5=packed
    )


def _type_of(class_name: str) -> Any:
    return getattr(import_torchvision().datasets, class_name)


def _open(class_name: str, root: Path, **arguments: Any) -> Any:
    try:
        return _type_of(class_name)(str(root), **arguments)
    except (RuntimeError, OSError, ValueError, TypeError, AssertionError) as error:
        downloading = arguments.get("download", False)
        advice = "check the connection, or " if downloading else ""
        raise DataError(
            f"{class_name} cannot be read from {root}: {error}; {advice}place the "
            "official files there"
        ) from error
