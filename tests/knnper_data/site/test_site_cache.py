import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from PIL import Image

from knnper.data.images import open_image
from knnper.data.site import open_site
from knnper.data.site_data import SiteData
from knnper.data.site_task import SiteTask
from knnper.errors import DataError
from knnper.settings import Choice
from tests.fresh_process import run_fresh
from tests.knnper_data.site.site_cases import IMAGES, opened, put_image, settings


def sized(size: int) -> SiteTask:
    return replace(IMAGES, spec=replace(IMAGES.spec, image_shape=(size, size, 3)))


@dataclass
class Site:
    """A folder of images and its cache; ``decoded`` grows by each decoded file."""

    root: Path
    cache: Path
    decoded: list[str] = field(default_factory=list)

    def kept(self, task: SiteTask = IMAGES, **values: str) -> SiteData:
        chosen = settings("image_folder", path=".", **values)
        return open_site(Choice("image_folder", chosen), self.root, task, self.cache)

    def fresh(self, **values: str) -> SiteData:
        return opened("image_folder", self.root, IMAGES, path=".", **values)

    def entries(self) -> list[Path]:
        return sorted(one for one in self.cache.iterdir() if one.is_dir())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path / "data", tmp_path / "state" / "cache")
    for number in range(12):
        put_image(found.root / ("cat", "dog")[number % 2] / f"{number}.bmp", 0)
    put_image(found.root / "cat" / "0.bmp", 1)

    def counted(path: str) -> AbstractContextManager[Image.Image]:
        found.decoded.append(path)
        return open_image(path)

    monkeypatch.setattr("knnper.data.images.open_image", counted)
    return found


def assert_same(found: SiteData, expected: SiteData) -> None:
    for (_, one), (_, other) in zip(found.splits(), expected.splits(), strict=True):
        assert one.names == other.names
        assert torch.equal(one.examples.labels, other.examples.labels)
        assert one.examples.images.dtype == other.examples.images.dtype
        assert torch.equal(one.examples.images, other.examples.images)
    assert found.dropped == expected.dropped
    assert found.num_ignored == expected.num_ignored
    assert found.task == expected.task


FILES = st.dictionaries(
    st.tuples(
        st.sampled_from(("train", "validation", "test")),
        st.sampled_from(("cat", "dog", "gnu")),
        st.sampled_from(("a.png", "b.bmp", "ä.PNG", "notes.txt")),
    ),
    st.integers(0, 9),
    max_size=12,
)


@given(files=FILES, split_folders=st.booleans())
@tried(max_examples=25, deadline=None)
def test_the_cache_changes_nothing(
    files: dict[tuple[str, str, str], int], split_folders: bool
) -> None:
    with TemporaryDirectory() as folder:
        site = Site(Path(folder, "data"), Path(folder, "cache"))
        put_image(
            site.root / ("train" if split_folders else "") / "cat" / "first.png", 3
        )
        for (split, label, name), seed in files.items():
            path = site.root / (split if split_folders else "") / label / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".txt":
                path.write_text("")
            else:
                put_image(path, seed)
        expected = site.fresh(unknown_labels="drop")
        for _ in range(2):
            found = site.kept(unknown_labels="drop")
            assert_same(found, expected)
        assert len(site.entries()) == 1


def test_the_second_opening_decodes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.cache.mkdir(parents=True, mode=0o755)
    first = site.kept()
    second = site.kept()
    assert len(site.decoded) == 12
    assert_same(second, first)
    # What is changed by whoever opened it is not changed on the disc.
    second.train.examples.images.zero_()
    assert_same(site.kept(), first)
    # Others cannot look into the folder.
    assert site.cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("knnper.data.images.DECODER", "another")
    site.kept()
    assert len(site.decoded) == 24


def swap(root: Path) -> None:
    """Let two files of equal size and time of modification take turns."""
    first, second = root / "cat" / "0.bmp", root / "cat" / "2.bmp"
    for path in (first, second):
        os.utime(path, ns=(1, 1))
    first.rename(root / "aside")
    second.rename(first)
    (root / "aside").rename(second)


def keep_size_and_time(root: Path) -> None:
    path = root / "dog" / "1.bmp"
    before = path.stat()
    put_image(path, 77)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize(
    "change",
    [
        swap,
        keep_size_and_time,
        lambda root: put_image(root / "dog" / "new.png", 5),
        lambda root: (root / "dog" / "3.bmp").unlink(),
        lambda root: (root / "dog" / "3.bmp").rename(root / "cat" / "3.bmp"),
    ],
)
def test_a_change_leads_to_a_new_entry_alone(
    site: Site, change: Callable[[Path], object]
) -> None:
    site.kept()
    (before,) = site.entries()
    site.kept(sized(2))
    change(site.root)
    assert_same(site.kept(), site.fresh())
    (after,) = site.entries()
    assert after != before


def test_a_file_that_changes_within_a_tick_of_the_clock(site: Site) -> None:
    for seed in range(5):
        put_image(site.root / "cat" / "0.bmp", seed)
        found = site.kept()
        assert_same(found, site.fresh())


def test_tasks_of_different_forms_take_turns(site: Site) -> None:
    sizes = [sized(size) for size in (2, 3, 4, 5)]
    for task in sizes[:3]:
        site.kept(task)
    site.decoded.clear()
    for task in (*sizes[1:3], sizes[0]):
        found = site.kept(task).train.examples.images
        assert found.shape[1:] == task.spec.image_shape
        time.sleep(0.02)
    assert site.decoded == []
    site.kept(sizes[3])
    assert len(site.entries()) == 3
    site.decoded.clear()
    site.kept(sizes[0])
    assert site.decoded == []
    site.kept(sizes[1])
    assert len(site.decoded) == 12


def test_what_cannot_be_read_is_not_kept(site: Site) -> None:
    site.kept()
    (site.root / "cat" / "bad.png").write_bytes(b"no image")
    for _ in range(2):
        with pytest.raises(DataError, match=r"bad\.png cannot be read as an image"):
            site.kept()
        assert site.entries() == []
    put_image(site.root / "cat" / "bad.png", 8)
    assert len(site.kept().train) > 0
    assert len(site.entries()) == 1


def test_a_damaged_entry_is_replaced(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    first = site.kept()
    file = site.entries()[0] / "images.npy"
    os.truncate(file, file.stat().st_size - 1)
    assert_same(site.kept(), first)
    assert "is damaged" in caplog.text
    np.save(file, np.zeros((3, 4, 4, 3), dtype=np.uint8))
    assert_same(site.kept(), first)
    assert "expected shape (12, 4, 4, 3)" in caplog.text


def test_without_a_folder_it_works_all_the_same(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found = replace(site, cache=tmp_path / "file" / "cache").kept()
    assert_same(found, site.fresh())
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "decoded without a cache" in caplog.text


def test_openings_at_once_decode_once(site: Site) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: site.kept(), range(4)))
    assert len(site.decoded) == 12
    for one in found[1:]:
        assert_same(one, found[0])


KILLED = """
import os, signal
from pathlib import Path
import knnper.data.image_cache as decoded_files
from tests.knnper_data.site.test_site_cache import Site

decoded_files.sync_to_disc = lambda path: os.kill(os.getpid(), signal.SIGKILL)
Site(Path({root!r}), Path({cache!r})).kept()
"""


def test_a_kill_leaves_nothing_that_is_taken_for_whole(
    site: Site, tmp_path: Path
) -> None:
    code = KILLED.format(root=str(site.root), cache=str(site.cache))
    assert run_fresh(code, tmp_path).returncode == -signal.SIGKILL
    (left,) = site.entries()
    assert left.name.endswith(".unfinished")
    site.kept()
    assert len(site.decoded) == 12
    (entry,) = site.entries()
    assert entry.name == left.name.removesuffix(".unfinished")
