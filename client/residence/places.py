"""Where in a client's state folder things are."""

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """The parts of a client's state folder.

    Attributes
    ----------
    folder
        The client's state folder.
    """

    folder: Path

    @property
    def identity(self) -> Path:
        """Whose folder it is."""
        return self.folder / "identity.json"

    @property
    def models(self) -> Path:
        """Model folders, by fingerprint."""
        return self.folder / "models"

    def model(self, fingerprint: str) -> Path:
        """Return the folder of one model."""
        return self.models / fingerprint

    @property
    def store(self) -> Path:
        """The client's memory."""
        return self.folder / "store"

    @property
    def offered(self) -> Path:
        """Which of the site's examples the memory was ever given."""
        return self.folder / "offered.json"

    @property
    def serving(self) -> Path:
        """What is served."""
        return self.folder / "serving.json"

    @property
    def pending(self) -> Path:
        """The folder of what is to be served next."""
        return self.folder / "next"

    @property
    def drafts(self) -> Path:
        """What is being made; whatever is left there by a kill is of no use."""
        return self.folder / ".drafts"

    def installing(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that one process at a time is in: whoever installs."""
        return self._locked("installing.lock")

    def committing(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that one process at a time is in, and never for long."""
        return self._locked("committing.lock")

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        # The lock goes with the process, however that ends.
        with (self.folder / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
