"""Links, pipes and sockets where a folder from elsewhere ought to have files."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path


def content_of(folder: Path) -> dict[Path, bytes]:
    """Return all files in a folder with their content."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_victim(folder: Path) -> Path:
    """Make a folder that must stay as it is."""
    (folder / "round-000001").mkdir(parents=True)
    for path in ("file", "manifest.json", "1.index", "round-000001/state"):
        (folder / path).write_text("precious")
    return folder


def link_to_folder(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def link_to_file(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "file")


def dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "new")


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, victim: Path) -> None:
    # Its name may have 107 bytes at most.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as unbound:
            unbound.bind(path.name)
    finally:
        os.chdir(before)


Plant = Callable[[Path, Path], None]
PLANTS: dict[str, Plant] = {
    function.__name__: function
    for function in (link_to_folder, link_to_file, dangling_link, pipe, unix_socket)
}


def plant(kind: str, path: Path, victim: Path) -> None:
    """Put something foreign in place of what is at ``path``."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    PLANTS[kind](path, victim)
