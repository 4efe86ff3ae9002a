"""The client's state folder: whose it is, and what runs or ran from it."""

import os
from dataclasses import dataclass
from pathlib import Path

from client.node.activation import Activation
from client.node.lock import LOCK_FILE, holder
from client.residence.errors import ResidenceError
from client.residence.identity import require_own
from client.residence.places import Places
from client.residence.serving import read_serving
from client.site.refusals import REFUSALS, last_refusal
from knnper.private_folders import is_private
from knnper.transport.credentials.node_keys import fingerprint, read_node_key
from knnper.transport.diagnosis.finding import (
    Finding,
    fine,
    problem,
    problem_told,
    warning,
)


@dataclass(frozen=True)
class State:
    """A state folder.

    Attributes
    ----------
    places
        The folder.
    name
        Of the client that it should be of.
    key
        Its private key; None without one.
    """

    places: Places
    name: str
    key: Path | None

    def is_own(self) -> Finding:
        """Look whether the folder is this client's."""
        if not self.places.identity.exists():
            return fine(f"{self.places.folder} is nobody's yet")
        key = None
        if self.key is not None:
            key = fingerprint(read_node_key(self.key).public_key())
        try:
            require_own(self.places, self.name, key)
        except ResidenceError as error:
            return problem_told(str(error))
        return fine(f"{self.places.folder} is that of {self.name}")

    def is_private(self) -> Finding:
        """Look whether other users of this machine are kept out."""
        folder = self.places.folder
        if not folder.exists():
            return fine(f"{folder} is yet to be made")
        if is_private(folder):
            return fine(f"no other user can look into {folder}")
        return warning(
            f"other users can look into {folder}, which holds the site's examples",
            f"chmod 700 {folder}",
            "mode 0700",
        )

    def node(self) -> Finding:
        """Look whether the client's node runs, or ended without leaving."""
        folder = self.places.folder
        process = holder(folder)
        if process is not None:
            return fine(f"runs (process {process})")
        if did_not_leave(folder):
            return warning(
                "does not run, and did not leave in order the last time",
                "start it: knnper client; the server lets it in within a minute",
            )
        return fine("does not run; start it with: knnper client")

    def last_refusal(self) -> Finding:
        """Look what was refused since a model was installed, if anything was."""
        refusal = last_refusal(self.places.folder)
        if refusal is None:
            return fine("none was noted")
        when = f"{refusal.time:%Y-%m-%d %H:%M} UTC"
        serving = read_serving(self.places.serving)
        if serving is not None and serving.installed > refusal.time.timestamp():
            return fine(f"the last one, of {when}, is older than the model")
        if refusal.about == "model":
            return problem(
                f"at {when}, {refusal.reason}",
                "install the same versions on both sides, and let the run hand its "
                "model over again",
                "the fingerprint that the server announced",
            )
        if refusal.about == "run":
            return warning(
                f"at {when}, this client refused a run: {refusal.reason}",
                "if it is wanted, change client.yaml; or ask the server's operator for "
                "another experiment",
            )
        return warning(
            f"at {when}, the server refused this client: {refusal.reason}",
            f"once that is mended, remove {self.places.folder / REFUSALS}",
        )


def did_not_leave(folder: Path) -> bool:
    """Return whether the last node of a state folder ended without leaving."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return Activation.of(folder, descriptor).left_behind() is not None
    finally:
        os.close(descriptor)
