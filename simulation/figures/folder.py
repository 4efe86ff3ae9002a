"""The folder in which a figure keeps its numbers, its pictures and how it was made."""

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from pydantic_core import to_jsonable_python

from knnper.config.errors import FolderTakenError
from knnper.config.sections import Settings
from knnper.durable_files import JsonLines, write_atomically
from simulation.trained_model import TrainedModel

PartRecord = Mapping[str, Any]
OnPart = Callable[[int, int], None]
"""``(done, total) -> None``: is told how many parts are finished."""

_PARTS = "parts.jsonl"
_DOTS_PER_INCH = 150


def identity_of(
    name: str, model: TrainedModel, settings: Settings, seed: int
) -> Mapping[str, Any]:
    """Return all that the numbers of a figure depend on, as plain values."""
    return {
        "figure": name,
        "model": model.fingerprint,
        "seed": seed,
        "settings": to_jsonable_python(settings),
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
    def open(cls, path: Path, identity: Mapping[str, Any]) -> "FigureFolder":
        """Return the folder of a figure, new or begun before.

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
        """
        if path.exists() and not path.is_dir():
            raise FolderTakenError(
                f"{path} is a file; expected a folder for the figure"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder._require_same(json.loads(json.dumps(identity)))
        return folder

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
        done = {record["part"]: record for record in self._lines.read()[1:]}
        num_done = sum(name in done for name in names)
        on_part(num_done, len(names))
        for name in names:
            if name in done:
                continue
            began = time.monotonic()
            record = dict(make(name))
            seconds = time.monotonic() - began
            done[name] = {"part": name, "seconds": seconds, **record}
            self._lines.append(done[name])
            num_done += 1
            on_part(num_done, len(names))
        return [done[name] for name in names]

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

    def _require_same(self, identity: Mapping[str, Any]) -> None:
        lines = self._lines.read()
        if not lines:
            if any(path.name != _PARTS for path in self.path.iterdir()):
                raise FolderTakenError(
                    f"{self.path} is not empty and holds no figure; choose another "
                    "folder with --output"
                )
            self._lines.append(identity)
            return
        names = sorted(identity.keys() | lines[0].keys())
        other = [name for name in names if identity.get(name) != lines[0].get(name)]
        if other:
            raise FolderTakenError(
                f"{self.path} holds a figure with another {', '.join(other)}; give the "
                "same again, or choose another folder with --output"
            )
