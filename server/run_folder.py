"""The folder of a run: settings, manifest, clients, rounds and results."""

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

import knnper
from knnper.errors import ConfigError, FolderTakenError, Problem, RunError
from knnper.experiment import Experiment
from knnper.experiment_file import Catalogue, read_experiment, results_identity, to_yaml
from knnper.files import (
    FileLock,
    JsonLines,
    LockHeldError,
    draft_of,
    lock_holder,
    open_plain,
    parse_json,
    require_plain,
    write_atomically,
)
from knnper.server.checkpoints import delete_after, rounds_in
from knnper.server.distribution_log import DistributionLog
from knnper.server.result_files import (
    results_problem,
    round_problem,
    with_present_names,
    write_clients_csv,
)
from knnper.server.roster import Roster
from knnper.server.traces import digests
from knnper.strategies.core.evaluation import ClientResult

EXPERIMENT = "experiment.yaml"
RESULTS = "results.json"
LOCK = ".lock"
# A folder may be deleted if its experiment file begins with this line, so it must not
# occur in files that people write.
FIRST_LINE = "# All settings of the run in this folder; written by `knnper simulate`.\n"
OWN_CODE = "own_code"  # in the manifest: fingerprints of a user's code, by reference

_MANIFEST = "manifest.json"
_ROSTER = "clients.json"
_SESSION = "session"
_CLIENTS = "clients.csv"
_ROUNDS = "rounds.jsonl"
_CHECKPOINTS = "checkpoints"
_TRACES = "traces"  # in the manifest: SHA-256 of device traces, by file
_PACKAGES = ("flwr", "ray", "torch", "torchvision", "faiss-cpu", "numpy")

log = logging.getLogger(__name__)


def environment() -> dict[str, Any]:
    """Return versions and machine as plain values."""
    return {
        "versions": {
            "python": platform.python_version(),
            "knnper": knnper.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write plain values as JSON; NaN and infinities become null."""
    write_atomically(path, f"{json.dumps(finite(document), indent=2)}\n")


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in a run's folder."""
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is missing: the run is not done; resume it with "
            f"--resume {path.parent}"
        ) from error
    except ValueError as error:
        raise RunError(f"{path} is damaged, expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise RunError(f"{path} is damaged, expected a JSON object")
    return document


def finite(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values in which null replaces NaN and infinities."""
    plain: dict[str, Any] = json.loads(to_json(document, inf_nan_mode="null"))
    return plain


def is_run(path: Path) -> bool:
    """Return whether the folder holds a run that this project began."""
    try:
        with open_plain(path / EXPERIMENT) as file:
            return file.readline() == FIRST_LINE.encode()
    except OSError:
        return False


def make_empty(path: Path) -> None:
    """Delete everything in a run's folder except the lock, which is held."""
    entries = [entry for entry in path.iterdir() if entry.name != LOCK]
    # The file that marks the folder as a run goes last, so that a deletion that was
    # interrupted can be repeated.
    for entry in sorted(entries, key=lambda entry: entry.name == EXPERIMENT):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@dataclass(frozen=True)
class RunFolder:
    """A run's folder; made by `create` or `open`."""

    path: Path

    @classmethod
    def create(
        cls, path: Path, experiment: Experiment, *, overwrite: bool = False
    ) -> "RunFolder":
        """Make a new folder that holds ``experiment`` only.

        Raises
        ------
        FolderTakenError
            See `require_free`.
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
        """Refuse a ``path`` at which `create` cannot make a run.

        Raises
        ------
        FolderTakenError
            It is a file, holds other files, or holds a run and ``overwrite`` is false.
        RunError
            Another process leads the run in it.
        """
        if path.exists() and not path.is_dir():
            raise FolderTakenError(f"{path} is a file; expected a folder for the run")
        # These are left where `create` was killed before its first file was complete.
        leftovers = {path / LOCK, draft_of(path / EXPERIMENT)}
        if not path.exists() or leftovers.issuperset(path.iterdir()):
            return
        if not is_run(path):
            raise FolderTakenError(
                f"{path} is not empty and holds no run; choose another folder with "
                "--output"
            )
        if not overwrite:
            raise FolderTakenError(
                f"{path} holds a run already; resume it with --resume {path}, delete "
                "it with --overwrite, or choose another folder with --output"
            )
        cls(path).require_idle()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of an existing run."""
        if not (path / EXPERIMENT).is_file():
            raise RunError(
                f"{path} holds no run: {EXPERIMENT} is missing. Give the folder that "
                "was named by --output, or start the run again"
            )
        require_plain(path)
        return cls(path)

    def experiment(
        self, catalogue: Catalogue, overrides: Sequence[str] = ()
    ) -> Experiment:
        """Read the run's experiment, with overrides that change no result.

        Raises
        ------
        ConfigError
            An override would change results.
        """
        source = self.path / EXPERIMENT
        started = read_experiment(source, catalogue)
        resumed = read_experiment(source, catalogue, overrides)
        # The order of weights in checkpoints follows the memory format.
        formats = {
            getattr(experiment.model.settings, "memory_format", None)
            for experiment in (started, resumed)
        }
        is_same = results_identity(started) == results_identity(resumed)
        if not is_same or len(formats) > 1:
            message = (
                f"found {', '.join(overrides)}, which makes it another experiment; "
                "expected settings of the section run that change no result, such as "
                "run.num_workers. Start the changed experiment in a folder of its own"
            )
            raise ConfigError([Problem("override", message)], str(source))
        if changed := self._changed_code(started):
            log.warning("%s", changed)
        return resumed

    def _changed_code(self, experiment: Experiment) -> str:
        """Name the user's code that changed since the run began; empty if none did."""
        if not experiment.own() or not (self.path / _MANIFEST).exists():
            return ""
        before: Mapping[str, str] = self.manifest().get(OWN_CODE, {})
        changed = [
            code.name
            for code in experiment.own().values()
            if before.get(code.name, code.fingerprint) != code.fingerprint
        ]
        if not changed:
            return ""
        return f"{', '.join(changed)} changed since the run in {self.path} began"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from leading this run inside the block."""
        try:
            lock = FileLock(self.path / LOCK)
        except LockHeldError as error:
            raise RunError(
                f"another process is at work on the run in {self.path}; wait for it, "
                "or end it first (`flwr stop` ends a server that stays for clients "
                "that come late)"
            ) from error
        with lock:
            yield

    def require_idle(self) -> None:
        """Refuse a run that a process leads."""
        with self.locked():
            pass

    def is_led(self) -> bool:
        """Return whether a process leads the run, without disturbing it."""
        return lock_holder(self.path / LOCK) is not None

    @property
    def checkpoints(self) -> Path:
        """Folder of the server's states."""
        return self.path / _CHECKPOINTS

    @property
    def tensorboard(self) -> Path:
        """Folder of the curves for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def distributed(self) -> DistributionLog:
        """Which clients have the model, and what they reported."""
        return DistributionLog(self.path / "personalization.jsonl")

    def write_manifest(
        self,
        experiment: Experiment,
        split: str,
        command: Sequence[str],
        conditions: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write the conditions under which the run began, or add that it was resumed.

        ``split`` is the hash of the partition, ``conditions`` are further entries.
        """
        started = datetime.now(UTC).isoformat(timespec="seconds")
        start: dict[str, Any] = {"command": list(command), "started": started}
        if (self.path / _MANIFEST).exists():
            self.require_same_conditions(experiment, split)
            manifest = self.manifest()
            manifest["resumed"].append(start)
        else:
            conditions = {
                **conditions,
                "results_identity": results_identity(experiment),
                "partition_hash": split,
            }
            if own_code := experiment.own().values():
                conditions[OWN_CODE] = {
                    code.name: code.fingerprint for code in own_code
                }
            if traces := digests(experiment.training.devices):
                conditions[_TRACES] = traces
            manifest = {**conditions, **start, **environment(), "resumed": []}
        write_document(self.path / _MANIFEST, manifest)

    def require_same_conditions(self, experiment: Experiment, split: str) -> None:
        """Refuse data, traces and users' code that changed since the run began."""
        manifest = self.manifest()
        expected = manifest["partition_hash"]
        if expected != split:
            raise RunError(
                f"the data has changed since the run in {self.path} began: expected "
                f"the split {expected[:12]}, found {split[:12]}. Restore it, or start "
                "again"
            )
        traces = digests(experiment.training.devices)
        if manifest.get(_TRACES, {}) != traces:
            raise RunError(
                f"{' or '.join(traces)} has changed since the run in {self.path} "
                "began; restore it, or start again"
            )
        if changed := self._changed_code(experiment):
            raise RunError(
                f"{changed}, and its results would be of both; restore the code, or "
                "start again"
            )

    def manifest(self) -> dict[str, Any]:
        """Read ``manifest.json``."""
        return read_document(self.path / _MANIFEST)

    def session(self) -> str:
        """Return the random id of this run, which is made at the first call."""
        path = self.path / _SESSION
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")

    def write_roster(self, roster: Roster) -> None:
        """Write the clients of a run over real clients."""
        write_document(self.path / _ROSTER, asdict(roster))

    def roster(self) -> Roster | None:
        """Read the clients; return None if they were not written."""
        if not (self.path / _ROSTER).exists():
            return None
        document = read_document(self.path / _ROSTER)
        try:
            roster = TypeAdapter(Roster).validate_python(document)
        except ValidationError as error:
            raise RunError(
                f"{self.path / _ROSTER} is damaged: {error}; start the run again in "
                "another folder"
            ) from error
        return Roster.of(roster.members, roster.split)

    def go_back(self, server_round: int) -> None:
        """Make ``server_round`` the last one, and delete what came later.

        Raises
        ------
        RunError
            There is no checkpoint of this round.
        """
        rounds = rounds_in(self.checkpoints)
        if server_round not in rounds:
            known = ", ".join(map(str, rounds)) or "none"
            raise RunError(
                f"expected a round of which {self.path} has a checkpoint ({known}), "
                f"found {server_round}"
            )
        with self.locked():
            # First, since a run with results counts as finished.
            (self.path / RESULTS).unlink(missing_ok=True)
            delete_after(self.checkpoints, server_round)
            self.drop_rounds_after(server_round)

    def write_clients_csv(
        self,
        results: Iterable[ClientResult],
        metrics: Sequence[str] = (),
        columns: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Write ``clients.csv``, see `knnper.server.result_files.write_clients_csv`."""
        write_clients_csv(self.path / _CLIENTS, results, metrics, columns)

    def write_results(self, document: Mapping[str, Any]) -> None:
        """Write ``results.json`` as the last file, which marks the run as finished."""
        write_document(self.path / RESULTS, document)

    def is_finished(self) -> bool:
        """Return whether the run has its results."""
        return (self.path / RESULTS).is_file()

    def results(self) -> dict[str, Any]:
        """Read ``results.json``."""
        path = self.path / RESULTS
        document = read_document(path)
        if problem := results_problem(document):
            raise RunError(
                f"{path} is damaged: {problem}. Restore a copy of the file, or remove "
                f"it and finish the run again with --resume {self.path}"
            )
        return with_present_names(document)

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round to ``rounds.jsonl``; NaN becomes null."""
        JsonLines(self.path / _ROUNDS).append(finite(record))

    def rounds(self) -> list[dict[str, Any]]:
        """Read the records of the rounds, oldest first."""
        records = JsonLines(self.path / _ROUNDS).read()
        for number, record in enumerate(records, start=1):
            if problem := round_problem(record):
                raise RunError(
                    f"line {number} of {self.path / _ROUNDS} is damaged: {problem}. "
                    "Restore a copy of the file, or start the run again in another "
                    "folder"
                )
        return records

    def drop_rounds_after(self, server_round: int) -> None:
        """Drop the records of later rounds, which are about to be repeated."""
        earlier = [
            record for record in self.rounds() if record["server_round"] <= server_round
        ]
        JsonLines(self.path / _ROUNDS).replace(earlier)
