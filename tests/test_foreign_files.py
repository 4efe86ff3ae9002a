"""Files of folders from elsewhere: no link is followed, no pipe waited for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from knnper.errors import CredentialError
from knnper.files import (
    FileLock,
    ForeignFileError,
    JsonLines,
    draft_of,
    lock_holder,
    open_plain,
    read_document,
    read_file,
    read_plain,
    require_plain,
    write_atomically,
)
from knnper.transport.credentials import read_certificate
from knnper.yaml_text import read_yaml
from tests.foreign_files import PLANTS, content_of, make_victim, plant

pytestmark = pytest.mark.usefixtures("deadline")


@dataclass(frozen=True)
class Document:
    number: int


OPENINGS: dict[str, Callable[[Path], object]] = {
    "read": read_plain,
    "append": lambda path: open_plain(path, "ab"),
    "overwrite": lambda path: open_plain(path, "r+b"),
    "lock": FileLock,
    "add a line": lambda path: JsonLines(path).append({"a": 1}),
    "read a document": lambda path: read_document(Document, path, "mend it"),
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    return make_victim(tmp_path / "victim")


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("opening", OPENINGS)
def test_no_foreign_file_is_opened(
    kind: str, opening: str, tmp_path: Path, victim: Path
) -> None:
    before = content_of(victim)
    plant(kind, tmp_path / "file", victim)
    with pytest.raises(ForeignFileError, match=r"file is a (link|pipe|socket)"):
        OPENINGS[opening](tmp_path / "file")
    assert content_of(victim) == before


@pytest.mark.parametrize("kind", PLANTS)
def test_a_draft_is_not_written_through_a_link(
    kind: str, tmp_path: Path, victim: Path
) -> None:
    before = content_of(victim)
    plant(kind, draft_of(tmp_path / "x.json"), victim)
    plant("link_to_file", tmp_path / "x.json", victim)
    write_atomically(tmp_path / "x.json", "new")
    assert content_of(victim) == before
    assert read_plain(tmp_path / "x.json") == b"new"


def test_a_holder_is_not_looked_for_behind_a_link(tmp_path: Path, victim: Path) -> None:
    plant("link_to_file", tmp_path / "lock", victim)
    with pytest.raises(ForeignFileError, match="lock is a link"):
        lock_holder(tmp_path / "lock")
    plant("pipe", tmp_path / "lock", victim)
    assert lock_holder(tmp_path / "lock") is None


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("place", ["entry", "a/b/entry"])
def test_a_folder_with_something_foreign_is_refused(
    kind: str, place: str, tmp_path: Path, victim: Path
) -> None:
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").touch()
    require_plain(folder)
    plant(kind, folder / place, victim)
    with pytest.raises(ForeignFileError, match=f"{place} is a (link|pipe|socket)"):
        require_plain(folder)
    require_plain(folder, but=(place.partition("/")[0],))


def test_a_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk" / "folder").mkdir(parents=True)
    (tmp_path / "folder").symlink_to(tmp_path / "disk" / "folder")
    require_plain(tmp_path / "folder")
    require_plain(tmp_path / "none")


def test_files_of_settings_and_keys_may_be_links_but_not_pipes(
    tmp_path: Path, victim: Path
) -> None:
    (tmp_path / "real.yaml").write_text("name: a\n")
    (tmp_path / "linked.yaml").symlink_to(tmp_path / "real.yaml")
    assert read_yaml(tmp_path / "linked.yaml") == {"name": "a"}
    plant("pipe", tmp_path / "pipe", victim)
    with pytest.raises(ForeignFileError, match="a pipe"):
        read_file(tmp_path / "pipe")
    with pytest.raises(CredentialError, match="a pipe"):
        read_certificate(tmp_path / "pipe")
