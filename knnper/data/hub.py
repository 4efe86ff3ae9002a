"""Folders of downloads, and files of the Hugging Face Hub."""

import contextlib
from pathlib import Path

from knnper.data.cache import cache_root
from knnper.errors import DataError
from knnper.process import import_extra
from knnper.reasons import Code, SafeReason


def download_folder(root: str | None) -> Path:
    """Return the absolute ``root``; without one, ``downloads`` in the cache."""
    return Path(root).expanduser().absolute() if root else cache_root() / "downloads"


def hub_folder(
    name: str, *, download: bool, extra: str, repo_type: str = "model"
) -> Path:
    """Return a local folder, or that of what the Hugging Face Hub calls ``name``.

    The latter is looked for in the Hub's cache on this machine, and is downloaded only
    where ``download`` says so. Files of weights are not.
    """
    folder = Path(name).expanduser().absolute()
    if folder.is_dir():
        return folder
    hub = import_extra("huggingface_hub", extra, f"{name!r}, which is no folder,")
    is_model = repo_type == "model"

    def kept(*, local: bool) -> Path:
        found = hub.snapshot_download(
            name,
            repo_type=repo_type,
            local_files_only=local,
            allow_patterns=["*.json", "*.txt", "*.model"] if is_model else None,
        )
        return Path(found)

    try:
        # What is there is taken as it is: all processes of a run read the same.
        with contextlib.suppress(OSError, ValueError):
            return kept(local=True)
        return kept(local=not download)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "" if download else ", or set data.download=true"
        raise DataError(
            f"{folder} is no folder, and {name!r} is not to be had from the Hugging "
            f"Face Hub or its cache ({reason}); give a local folder{wanted}",
            reason=SafeReason(Code.MISSING_FILE),
        ) from error
