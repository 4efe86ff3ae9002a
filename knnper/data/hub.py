"""Folders of downloads, and files of the Hugging Face Hub."""

import contextlib
from pathlib import Path

from knnper.data.cache import cache_root
from knnper.errors import DataError
from knnper.process import import_extra
from knnper.reasons import Code, SafeReason


def download_folder(root: str | None) -> Path:
    """Return the absolute ``root``, or for None the cache's folder ``downloads``."""
    return Path(root).expanduser().absolute() if root else cache_root() / "downloads"


def find_hub_folder(
    name: str, *, download: bool, extra: str, repo_type: str = "model"
) -> Path:
    """Find the folder ``name``, or the snapshot of the Hub's repository ``name``.

    A repository is searched in the Hub's cache on this machine first, and downloaded
    only if ``download`` is set. Of models, the files of weights are not downloaded.
    ``extra`` is the extra of our package to install if the Hub's client is missing.
    """
    folder = Path(name).expanduser().absolute()
    if folder.is_dir():
        return folder
    hub = import_extra("huggingface_hub", extra, f"{name!r}, which is no folder,")
    is_model = repo_type == "model"

    def find_snapshot(*, local: bool) -> Path:
        snapshot = hub.snapshot_download(
            name,
            repo_type=repo_type,
            local_files_only=local,
            allow_patterns=["*.json", "*.txt", "*.model"] if is_model else None,
        )
        return Path(snapshot)

    try:
        # A snapshot on this machine has precedence: all processes of a run read the
        # same files.
        with contextlib.suppress(OSError, ValueError):
            return find_snapshot(local=True)
        return find_snapshot(local=not download)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        download_hint = "" if download else ", or set data.download=true"
        raise DataError(
            f"{folder} is not a folder, and {name!r} cannot be loaded from the Hugging "
            f"Face Hub or its cache ({reason}); give a local folder{download_hint}",
            reason=SafeReason(Code.MISSING_FILE),
        ) from error
