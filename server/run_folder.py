"""The folder in which a run keeps all that it writes."""

import contextlib
import fcntl
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from knnper.config.catalogue import Catalogue
from knnper.config.document import results_identity, to_yaml
from knnper.config.errors import ConfigError, Problem, RunError
from knnper.config.loading import read_experiment
from knnper.config.sections import Experiment
from knnper.durable_files import JsonLines, write_atomically
from server.hand_over import Handed
from server.results import write_clients_csv
from server.roster import Roster
from server.run_marks import EXPERIMENT, FIRST_LINE, LOCK, is_run, make_empty
from strategies.core.evaluation import ClientResult

RESULTS = "results.json"
_ROSTER = "clients.json"
_SESSION = "session"
_CLIENT_RESULT = TypeAdapter(ClientResult)


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
        RunError
            If the folder is not empty and must not be overwritten, or holds something
            else than a run.
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
        RunError
            If the folder is not empty and must not be overwritten, holds something
            else than a run, or another process leads the run in it.
        """
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; expected a folder for the run")
        if not path.exists() or all(entry.name == LOCK for entry in path.iterdir()):
            return
        if not is_run(path):
            raise RunError(
                f"{path} is not empty and holds no run; choose another folder with "
                "--output"
            )
        if not overwrite:
            raise RunError(
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
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Where the curves for TensorBoard are."""
        return self.path / "tensorboard"

    def write_manifest(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Keep under what conditions the run is made; return all that is known.

        The first manifest stays; what it takes to go on with the run is added to it
        under ``resumed``.

        Raises
        ------
        RunError
            If the data is split otherwise than when the run was started.
        """
        name = "manifest.json"
        if not (self.path / name).exists():
            self._write_json(name, {**manifest, "resumed": []})
            return self._read_json(name)
        first = self._read_json(name)
        if first["partition_hash"] != manifest["partition_hash"]:
            raise RunError(
                f"the data is not what it was when the run in {self.path} began: "
                f"expected the split {first['partition_hash'][:12]}, found "
                f"{manifest['partition_hash'][:12]}. Bring it back, or start again"
            )
        again = {"command": manifest["command"], "started": manifest["started"]}
        complete = {**first, "resumed": [*first["resumed"], again]}
        self._write_json(name, complete)
        return complete

    def manifest(self) -> dict[str, Any]:
        """Return the content of ``manifest.json``."""
        return self._read_json("manifest.json")

    def session(self) -> str:
        """Return an id that this run has from its beginning, and no other."""
        path = self.path / _SESSION
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")

    def write_roster(self, roster: Roster) -> None:
        """Keep who takes part, where that is known only when the run begins."""
        self._write_json(_ROSTER, asdict(roster))

    def roster(self) -> Roster | None:
        """Return who takes part; None if it was not written.

        Raises
        ------
        RunError
            If the file is damaged.
        """
        if not (self.path / _ROSTER).exists():
            return None
        found = self._read_json(_ROSTER)
        try:
            return TypeAdapter(Roster).validate_python(found)
        except ValidationError as error:
            raise RunError(
                f"{self.path / _ROSTER} is damaged: {error}; start the run again in "
                "another folder"
            ) from error

    def write_clients_csv(self, results: Iterable[ClientResult]) -> None:
        """Write ``clients.csv``, see `server.results.write_clients_csv`."""
        write_clients_csv(self.path / "clients.csv", results)

    def write_results(self, document: Mapping[str, Any]) -> None:
        """Write ``results.json``, the last file: where it is, the run is done."""
        self._write_json(RESULTS, document)

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
        return self._read_json(RESULTS)

    def append_round(self, record: Mapping[str, float | int]) -> None:
        """Add the figures of one round to ``rounds.jsonl``; NaN becomes null."""
        self._round_lines.append(_finite(record))

    def rounds(self) -> list[dict[str, Any]]:
        """Return the figures of the rounds that were made, oldest first."""
        return self._round_lines.read()

    def drop_rounds_after(self, server_round: int) -> None:
        """Forget the rounds after ``server_round``: they are about to be made again."""
        records = self.rounds()
        kept = [one for one in records if one["server_round"] <= server_round]
        self._round_lines.replace(kept)

    def append_hand_over(self, model: str, handed: Handed) -> None:
        """Add that a client has the model with fingerprint ``model``."""
        result = handed.result
        document = {"result": asdict(result)} if result else {"client": handed.client}
        self._personalized.append({"model": model, **document})

    def load_hand_over(self, model: str) -> dict[str, ClientResult | None]:
        """Return by name what clients that have that model reported.

        None stands for a client that keeps its figures to itself.

        Raises
        ------
        RunError
            If the file is damaged elsewhere than in its last line.
        """
        records = [
            one for one in self._personalized.read() if one.get("model") == model
        ]
        handed = (self._handed(record) for record in records)
        return {one.client: one.result for one in handed}

    @property
    def _round_lines(self) -> JsonLines:
        return JsonLines(self.path / "rounds.jsonl")

    @property
    def _personalized(self) -> JsonLines:
        return JsonLines(self.path / "personalization.jsonl")

    def _handed(self, record: Mapping[str, Any]) -> Handed:
        if isinstance(record.get("client"), str):
            return Handed(record["client"], None)
        text = json.dumps(record.get("result"))
        try:
            result = _CLIENT_RESULT.validate_json(text, strict=True)
            return Handed(result.client, result)
        except ValidationError as error:
            raise RunError(
                f"a line of {self._personalized.path} is no client's result; remove "
                f"the file and resume the run: {error}"
            ) from error

    def _write_json(self, name: str, document: Mapping[str, Any]) -> None:
        text = json.dumps(_finite(document), indent=2)
        write_atomically(self.path / name, f"{text}\n")

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RunError(
                f"{path} is missing: the run is not done; go on with it with "
                f"--resume {self.path}"
            ) from error
        except ValueError as error:
            raise RunError(f"{path} is damaged, expected JSON: {error}") from error
        if not isinstance(document, dict):
            raise RunError(f"{path} is damaged, expected a JSON object")
        return document


def _finite(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values in which null stands for what JSON has no number for."""
    plain: dict[str, Any] = json.loads(to_json(value, inf_nan_mode="null"))
    return plain
