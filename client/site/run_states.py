"""Where a site keeps its state of each run, so that no run finds another's."""

import re
import shutil
from pathlib import Path

from knnper.config.document import results_identity
from knnper.config.errors import RunError
from knnper.config.sections import Experiment

KEPT = 4
"""Runs whose states are kept; an older one can be resumed as long as it is."""

_SESSION = re.compile(r"[A-Za-z0-9-]{0,64}")
_IDENTITY_DIGITS = 16


def run_states(state: Path, experiment: Experiment, session: str) -> Path:
    """Return the folder of one run, and remove those of runs long past.

    Parameters
    ----------
    state
        The client's state folder.
    experiment
        What the run is of.
    session
        Tells runs of the same experiment apart; the server's.

    Raises
    ------
    RunError
        If the session cannot be a part of a folder's name.
    """
    if not _SESSION.fullmatch(session):
        raise RunError(
            f"expected a session of at most 64 letters, digits and -, found "
            f"{session[:80]!r}; the server is of another version"
        )
    identity = results_identity(experiment)[:_IDENTITY_DIGITS]
    folder = state / "runs" / f"{identity}-{session}"
    if folder.exists():
        folder.touch()
    _remove_older(folder)
    return folder


def _remove_older(current: Path) -> None:
    if not current.parent.is_dir():
        return
    others = [one for one in current.parent.iterdir() if one != current]
    others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in others[KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)
