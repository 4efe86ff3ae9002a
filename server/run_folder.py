"""The folder in which a run keeps all that it writes."""

import contextlib
import fcntl
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from knnper.config.catalogue import Catalogue
from knnper.config.document import results_identity, to_yaml
from knnper.config.errors import ConfigError, FolderTakenError, Problem, RunError
from knnper.config.loading import read_experiment
from knnper.config.sections import Experiment
from knnper.durable_files import (
    JsonLines,
    draft_of,
    write_atomically,
)
from server.checkpoint import asides, put_aside, rounds_in
from server.hand_over_log import HandOverLog
from server.manifest import complete_manifest
from server.results import with_present_names, write_clients_csv
from server.roster import Roster
from server.run_documents import finite, read_document, write_document
from server.run_marks import EXPERIMENT, FIRST_LINE, LOCK, is_run, make_empty
from strategies.core.evaluation import ClientResult

RESULTS = "results.json"
_MANIFEST = "manifest.json"
_ROSTER = "clients.json"
_SESSION = "session"
_CLIENTS = "clients.csv"
_ROUNDS = "rounds.jsonl"
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder; made by `create` or `open`.

    Attributes
    ----------
    path
        The folder.
    """

    path: Path

    @classmethod
    def create(
        cls, path: Path, experiment: Experiment, *, overwrite: bool = False
    ) -> "RunFolder":
        """Return a new folder that holds nothing but ``experiment``.

        Parameters
        ----------
        path
            The folder; parents are created as needed.
        experiment
            The experiment that is about to run.
        overwrite
            Whether an earlier run in that folder may be deleted.

        Raises
        ------
        FolderTakenError, RunError
            As `require_free`.
        """
        cls.require_free(path, overwrite=overwrite)
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        with folder.locked():
            make_empty(path)
            write_atomically(path / EXPERIMENT, FIRST_LINE + to_yaml(experiment))
        return folder

    @classmethod
    def require_free(cls, path: Path, *, overwrite: bool) -> None:
        """Do nothing if `create` can make a run in ``path``.

        Raises
        ------
        FolderTakenError
            If the folder is not empty and must not be overwritten, or holds something
            else than a run.
        RunError
            If another process leads the run in it.
        """
        if path.exists() and not path.is_dir():
            raise FolderTakenError(f"{path} is a file; expected a folder for the run")
        # All that is there where making a run ended with its first file.
        own = {path / LOCK, draft_of(path / EXPERIMENT)}
        if not path.exists() or own.issuperset(path.iterdir()):
            return
        if not is_run(path):
            raise FolderTakenError(
                f"{path} is not empty and holds no run; choose another folder with "
                "--output"
            )
        if not overwrite:
            raise FolderTakenError(
                f"{path} holds a run already; go on with it with --resume {path}, "
                "delete it with --overwrite, or choose another folder with --output"
            )
        cls(path).require_idle()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that was started before.

        Raises
        ------
        RunError
            If there is no run in that folder.
        """
        if not (path / EXPERIMENT).is_file():
            raise RunError(
                f"{path} holds no run: {EXPERIMENT} is missing. Give the folder that "
                "was named by --output, or start the run anew"
            )
        return cls(path)

    def experiment(
        self, catalogue: Catalogue, overrides: Sequence[str] = ()
    ) -> Experiment:
        """Return the experiment of this run.

        Parameters
        ----------
        catalogue
            What can be chosen by name.
        overrides
            ``KEY=VALUE``; only what leaves the results as they are, such as
            ``run.num_workers``.

        Raises
        ------
        ConfigError
            As `read_experiment`, and if the overrides make it another experiment.
        """
        source = self.path / EXPERIMENT
        started = read_experiment(source, catalogue)
        resumed = read_experiment(source, catalogue, overrides)
        if results_identity(started) != results_identity(resumed):
            message = (
                f"found {', '.join(overrides)}, which makes it another experiment; "
                "expected settings of the section run that change no result, such as "
                "run.num_workers. Start the changed experiment in a folder of its own"
            )
            raise ConfigError([Problem("override", message)], str(source))
        return resumed

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from leading this run inside the block.

        The lock goes with the process, however that ends.

        Raises
        ------
        RunError
            If another process leads it.
        """
        with (self.path / LOCK).open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(
                    f"another process is at work on the run in {self.path}; wait for "
                    "it, or end it first (`flwr stop` ends a server that stays for "
                    "clients that come late)"
                ) from error
            yield

    def require_idle(self) -> None:
        """Refuse a run that a process leads.

        Raises
        ------
        RunError
            If one does.
        """
        with self.locked():
            pass

    def is_led(self) -> bool:
        """Return whether a process leads this run."""
        try:
            self.require_idle()
        except RunError:
            return True
        return False

    @property
    def checkpoints(self) -> Path:
        """Where the server keeps its state."""
        return self.path / _CHECKPOINTS

    @property
    def tensorboard(self) -> Path:
        """Where the curves for TensorBoard are."""
        return self.path / "tensorboard"

    @property
    def hand_overs(self) -> HandOverLog:
        """Which clients have the model, and what they reported."""
        return HandOverLog(self.path / "personalization.jsonl")

    def write_manifest(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Keep under what conditions the run is made; return all that is known.

        The first manifest stays; what it takes to go on with the run is added to it
        under ``resumed``.

        Raises
        ------
        RunError
            If the data is split otherwise than when the run was started.
        """
        path = self.path / _MANIFEST
        first = self.manifest() if path.exists() else None
        write_document(path, complete_manifest(first, manifest, self.path))
        return self.manifest()

    def manifest(self) -> dict[str, Any]:
        """Return the content of ``manifest.json``."""
        return read_document(self.path / _MANIFEST)

    def session(self) -> str:
        """Return an id that this run has from its beginning, and no other."""
        path = self.path / _SESSION
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")

    def write_roster(self, roster: Roster) -> None:
        """Keep who takes part, where that is known only when the run begins."""
        write_document(self.path / _ROSTER, asdict(roster))

    def roster(self) -> Roster | None:
        """Return who takes part; None if it was not written.

        Raises
        ------
        RunError
            If the file is damaged.
        """
        if not (self.path / _ROSTER).exists():
            return None
        found = read_document(self.path / _ROSTER)
        try:
            return TypeAdapter(Roster).validate_python(found)
        except ValidationError as error:
            raise RunError(
                f"{self.path / _ROSTER} is damaged: {error}; start the run again in "
                "another folder"
            ) from error

    def go_back(self, server_round: int) -> None:
        """Make a round the last one; what came later is put aside.

        It stays among the checkpoints, in a folder of its own, until a later end of the
        run has passed it. A kill in between leaves a run that can go back again.

        Raises
        ------
        RunError
            If there is no checkpoint of that round, or another process leads the run.
        """
        kept = rounds_in(self.checkpoints)
        if server_round not in kept:
            known = ", ".join(map(str, kept)) or "none"
            raise RunError(
                f"expected a round of which {self.path} has a checkpoint ({known}), "
                f"found {server_round}"
            )
        with self.locked():
            names = (RESULTS, _CLIENTS, _ROUNDS)
            files = [self.path / name for name in names if (self.path / name).exists()]
            put_aside(self.checkpoints, server_round, files)
            # With them the run would be done.
            (self.path / RESULTS).unlink(missing_ok=True)
            self.drop_rounds_after(server_round)

    def forget_aside(self) -> None:
        """Remove what was put aside, as far as the run has passed it."""
        passed = len(self.rounds())
        for aside in asides(self.checkpoints):
            if len(JsonLines(aside / _ROUNDS).read()) <= passed:
                shutil.rmtree(aside, ignore_errors=True)

    def write_clients_csv(self, results: Iterable[ClientResult]) -> None:
        """Write ``clients.csv``, see `server.results.write_clients_csv`."""
        write_clients_csv(self.path / _CLIENTS, results)

    def write_results(self, document: Mapping[str, Any]) -> None:
        """Write ``results.json``, the last file: where it is, the run is done."""
        write_document(self.path / RESULTS, document)

    def is_finished(self) -> bool:
        """Return whether the run has its results."""
        return (self.path / RESULTS).is_file()

    def results(self) -> dict[str, Any]:
        """Return the content of ``results.json``.

        Raises
        ------
        RunError
            If the run is not done, or the file is damaged.
        """
        return with_present_names(read_document(self.path / RESULTS))

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add the figures of one round to ``rounds.jsonl``; NaN becomes null."""
        self._round_lines.append(finite(record))

    def rounds(self) -> list[dict[str, Any]]:
        """Return the figures of the rounds that were made, oldest first."""
        return self._round_lines.read()

    def drop_rounds_after(self, server_round: int) -> None:
        """Forget the rounds after ``server_round``: they are about to be made again."""
        records = self.rounds()
        kept = [one for one in records if one["server_round"] <= server_round]
        self._round_lines.replace(kept)

    @property
    def _round_lines(self) -> JsonLines:
        return JsonLines(self.path / _ROUNDS)
