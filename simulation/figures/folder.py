"""The folder in which a figure keeps its numbers, its pictures and how it was made."""

import contextlib
import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from pydantic_core import to_jsonable_python

from knnper.config.errors import FolderTakenError
from knnper.config.sections import Experiment, Settings
from knnper.durable_files import JsonLines, write_atomically
from server.run_folder import RunFolder
from server.run_marks import LOCK
from simulation.batch.code import code_fingerprint
from simulation.batch.inputs import content_digest, inputs_of, split_of
from simulation.figures.lettering import boxes_told
from simulation.trained_model import TrainedModel

PartRecord = Mapping[str, Any]
OnPart = Callable[[int, int], None]
"""``(done, total) -> None``: is told how many parts are finished."""

_PARTS = "parts.jsonl"
_DOTS_PER_INCH = 150
_DATASET, _INITIAL_WEIGHTS, _SPLIT = "dataset", "initial_weights", "split"
_INPUTS = (_DATASET, _INITIAL_WEIGHTS, _SPLIT)
"""What the first line of an old folder does not say."""


def identity_of(
    name: str, model: TrainedModel, settings: Settings, seed: int
) -> Mapping[str, Any]:
    """Return all that the numbers of a figure depend on, as plain values."""
    return {
        "figure": name,
        "model": model.fingerprint,
        _DATASET: content_digest(model.dataset),
        "seed": seed,
        "settings": to_jsonable_python(settings),
    }


def identity_of_inputs(experiment: Experiment) -> Mapping[str, Any]:
    """Return what a figure that is trained from an experiment depends on beside it.

    Raises
    ------
    DataError
        If the data cannot be loaded or dealt.
    RunError
        If the file of weights cannot be read.
    """
    inputs = inputs_of(experiment)
    return {
        _DATASET: inputs.data,
        _INITIAL_WEIGHTS: inputs.weights,
        _SPLIT: split_of(experiment),
    }


@dataclass(frozen=True)
class FigureFolder:
    """A figure's folder; made by `open`.

    Attributes
    ----------
    path
        The folder.
    """

    path: Path

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Iterator["FigureFolder"]:
        """Yield the folder of a figure, new or begun before, to this process alone.

        Parameters
        ----------
        path
            The folder; parents are created as needed.
        identity
            All that the numbers depend on, as plain values.

        Raises
        ------
        FolderTakenError
            If the folder holds something else, or a figure with other settings.
        RunError
            If another process is at work in it.
        """
        if path.exists() and not path.is_dir():
            raise FolderTakenError(
                f"{path} is a file; expected a folder for the figure"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder._require_own()
        with RunFolder(path).locked():
            folder._require_same(json.loads(json.dumps(identity)))
            yield folder

    def finish(
        self,
        names: Sequence[str],
        make: Callable[[str], PartRecord],
        on_part: OnPart,
    ) -> list[PartRecord]:
        """Return the record of each part, making those that are not there yet.

        Parameters
        ----------
        names
            Of the parts; the records come in this order.
        make
            Returns the record of a part, plain values.
        on_part
            Is told at the beginning, and after each part.
        """
        done = {record["part"]: record for record in self._part_records()}
        num_done = sum(name in done for name in names)
        on_part(num_done, len(names))
        for name in names:
            if name in done:
                continue
            began = time.monotonic()
            record = dict(make(name))
            seconds = time.monotonic() - began
            made = {"part": name, "seconds": seconds, "code": code_fingerprint()}
            done[name] = {**made, **record}
            self._lines.append(done[name])
            num_done += 1
            on_part(num_done, len(names))
        return [done[name] for name in names]

    def older_code(self) -> Iterator[str]:
        """Yield what to tell of parts that other code made."""
        others = [record.get("code") for record in self._part_records()]
        if older := sum(code != code_fingerprint() for code in others):
            yield (
                f"{older} of the {len(others)} parts of the figure in {self.path} were "
                "made by another version of this code; to have all from this one, "
                "delete the folder and start again"
            )

    def write_description(
        self,
        identity: Mapping[str, Any],
        records: Sequence[PartRecord],
        details: Mapping[str, Any],
    ) -> None:
        """Write how the figure was made to a file of its name.

        Parameters
        ----------
        identity
            As of `identity_of`.
        records
            Of all parts; their seconds are summed up.
        details
            What else there is to say, as plain values.
        """
        seconds = round(sum(record["seconds"] for record in records), 1)
        document = {**identity, **details, "seconds": seconds}
        text = json.dumps(document, indent=2) + "\n"
        write_atomically(self.path / f"{identity['figure']}.json", text)

    def write_csv(
        self, name: str, header: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Write a table to ``name``; None becomes an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        write_atomically(self.path / name, text.getvalue())

    @boxes_told()
    def write_pictures(self, name: str, figure: Figure) -> None:
        """Write ``name``.png, ``name``.svg and ``name``.pdf."""
        # Without a date and with named parts, the same figure is the same file.
        with rc_context({"svg.hashsalt": name}):
            figure.savefig(self.path / f"{name}.svg", metadata={"Date": None})
        figure.savefig(self.path / f"{name}.pdf", metadata={"CreationDate": None})
        figure.savefig(self.path / f"{name}.png", dpi=_DOTS_PER_INCH)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path / _PARTS)

    def _part_records(self) -> list[PartRecord]:
        return [record for record in self._lines.read() if "part" in record]

    def _require_own(self) -> None:
        """Refuse a folder that is somebody else's, before anything is written there."""
        others = (path for path in self.path.iterdir() if path.name != LOCK)
        if not self._lines.read() and any(path.name != _PARTS for path in others):
            raise FolderTakenError(
                f"{self.path} is not empty and holds no figure; choose another "
                "folder with --output"
            )

    def _require_same(self, identity: Mapping[str, Any]) -> None:
        lines = self._lines.read()
        if not lines:
            self._lines.append(identity)
            return
        before = {**{name: identity.get(name) for name in _INPUTS}, **lines[0]}
        names = sorted(identity.keys() | before.keys())
        other = [name for name in names if identity.get(name) != before.get(name)]
        if other:
            raise FolderTakenError(
                f"{self.path} holds a figure with another {', '.join(other)}; give the "
                "same again, delete the folder to make it anew, or choose another one "
                "with --output"
            )
