"""Base of all figures: resumable folders, tables over runs, and serial rounds."""

import contextlib
import csv
import functools
import hashlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from knnper import Experiment
from knnper.datastore.memory import KnnSettings
from knnper.errors import FolderTakenError
from knnper.experiment_file import results_identity, to_document
from knnper.files import JsonLines, write_atomically
from knnper.server.checkpoints import CheckpointFolder
from knnper.server.federation import Federation
from knnper.server.rounds import RoundLoop
from knnper.server.run_folder import LOCK, RunFolder
from knnper.settings import dotted
from knnper.simulation.origin import (
    code_commit,
    code_fingerprint,
    content_digest,
    inputs_of,
    split_of,
)
from knnper.simulation.reports.estimate import estimate
from knnper.simulation.reports.figure import write_pictures
from knnper.simulation.reports.table import Chart, Shown, Table
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.trained_model import TrainedModel
from knnper.simulation.workbench import Workbench, runtime_of

PartRecord = Mapping[str, Any]
# ``(done, total) -> None``: called with the number of finished parts.
OnPart = Callable[[int, int], None]
PARTS = "parts.jsonl"


@functools.cache
def figure_code() -> str:
    """Hash the code of the package and of the papers with SHA-256."""
    digest = hashlib.sha256(code_fingerprint().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def over_runs(of_each: Sequence[Sequence[Table]]) -> list[Table]:
    """Average tables over runs, with half of the 95 % interval after ±.

    All tables have the same rows. Columns are matched by header; columns that some
    tables lack are left out.
    """
    means = []
    for same in zip(*of_each, strict=True):
        shared = [
            column
            for column in same[0].header
            if all(column in table.header for table in same)
        ]
        cells = [
            [dict(zip(table.header, row, strict=True)) for row in table.rows]
            for table in same
        ]
        rows = tuple(
            tuple(_mean_cell([line[column] for line in lines]) for column in shared)
            for lines in zip(*cells, strict=True)
        )
        means.append(Table(same[0].title, tuple(shared), rows))
    return means


def markdown_of(tables: Iterable[Table]) -> str:
    """Format tables as Markdown, with a blank line between them."""
    return "\n".join(table.as_markdown() for table in tables)


def _mean_cell(texts: Sequence[str]) -> str:
    if len(set(texts)) == 1:
        return texts[0]
    numbers = [text.removesuffix(" %").replace(",", "") for text in texts]
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        return ""
    digits = max(len(number.partition(".")[2]) for number in numbers)
    return estimate(values).text(scale=1.0, digits=digits)


def knn_settings(experiment: Experiment) -> KnnSettings:
    """Return the experiment's settings of kNN-Per, or the defaults."""
    chosen = experiment.personalization.settings
    return chosen if isinstance(chosen, KnnSettings) else KnnSettings()


@contextlib.contextmanager
def serial_rounds(bench: Workbench) -> Iterator[tuple[RoundLoop, Federation]]:
    """Yield a round loop for this process; delete its files at the end."""
    identity = results_identity(bench.experiment)
    with tempfile.TemporaryDirectory() as name:
        checkpoints = CheckpointFolder(Path(name, "checkpoints"), identity)
        federation = SerialFederation(runtime_of(bench, Path(name)))
        roster = bench.roster
        loop = RoundLoop(bench, federation, roster, checkpoints, lambda _: None)
        yield loop, federation


@dataclass(frozen=True)
class Drawing:
    """One picture of a figure, its numbers and its provenance."""

    name: str
    title: str
    tables: tuple[Table, ...]
    header: Sequence[str]
    rows: Iterable[Sequence[object]]
    figure: Figure
    records: Sequence[PartRecord]
    details: Mapping[str, Any]


def identity_of(subject: TrainedModel | Experiment | None) -> Mapping[str, Any]:
    """Return the inputs of a figure beside its settings, for its identity."""
    if subject is None:
        return {}
    if isinstance(subject, TrainedModel):
        document = to_document(subject.experiment)
        return {
            "model": subject.fingerprint,
            "dataset": content_digest(subject.dataset),
            "run": subject.experiment.name,
            **{name: document[name] for name in ("partition", "personalization")},
        }
    inputs = inputs_of(subject)
    return {
        "experiment": to_document(subject),
        "dataset": inputs.data,
        "initial_weights": inputs.weights,
        "split": split_of(subject),
    }


@dataclass(frozen=True)
class FigureFolder:
    """Folder of a figure, used by one process at a time; created by `open`."""

    path: Path
    identity: Mapping[str, Any]
    on_part: OnPart

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, path: Path, identity: Mapping[str, Any], on_part: OnPart
    ) -> Iterator["FigureFolder"]:
        """Yield the folder of a new or unfinished figure."""
        if path.exists() and not path.is_dir():
            raise FolderTakenError(
                f"{path} is a file; expected a folder for the figure"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, json.loads(json.dumps(identity)), on_part)
        folder._require_own()
        with RunFolder(path).locked():
            folder._require_same()
            yield folder

    def finish(
        self, names: Iterable[str], make: Callable[[str], PartRecord]
    ) -> list[PartRecord]:
        """Return the record of each part in order; make missing parts."""
        names = list(names)
        done = {part["part"]: part for part in self._parts() if part["part"] in names}
        self.on_part(len(done), len(names))
        for name in names:
            if name in done:
                continue
            began = time.monotonic()
            record = dict(make(name))
            seconds = time.monotonic() - began
            meta = {"part": name, "seconds": seconds, "code": figure_code()}
            done[name] = {**meta, **record}
            self._lines.append(done[name])
            self.on_part(len(done), len(names))
        return [done[name] for name in names]

    def write(self, drawings: Sequence[Drawing]) -> Shown:
        """Write .csv, .md, .svg, .pdf, .png and .json of each drawing."""
        for drawing in drawings:
            cells = io.StringIO()
            writer = csv.writer(cells, lineterminator="\n")
            writer.writerow(drawing.header)
            writer.writerows(drawing.rows)
            write_atomically(self.path / f"{drawing.name}.csv", cells.getvalue())
            write_atomically(
                self.path / f"{drawing.name}.md", markdown_of(drawing.tables)
            )
            write_pictures(self.path, drawing.name, drawing.figure)
            seconds = round(sum(record["seconds"] for record in drawing.records), 1)
            about = {**self.identity, "figure": drawing.name, **drawing.details}
            about |= {"seconds": seconds, "code": code_commit() or figure_code()}
            text = json.dumps(about, indent=2) + "\n"
            write_atomically(self.path / f"{drawing.name}.json", text)
        return Shown(
            tuple(table for drawing in drawings for table in drawing.tables),
            tuple(
                Chart(drawing.name, drawing.title, drawing.figure)
                for drawing in drawings
            ),
            tuple(self._remarks()),
        )

    def _remarks(self) -> Iterator[str]:
        made_by = [record.get("code") for record in self._parts()]
        if older := sum(code != figure_code() for code in made_by):
            yield (
                f"{older} of the {len(made_by)} parts of the figure in {self.path} "
                "were made by another version of this code; to make all parts with "
                "this version, delete the folder and start again"
            )

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path / PARTS)

    def _parts(self) -> list[PartRecord]:
        return [record for record in self._lines.read() if "part" in record]

    def _require_own(self) -> None:
        """Raise if a folder is not a figure's, before anything is written to it."""
        others = (
            path for path in self.path.iterdir() if path.name not in (LOCK, PARTS)
        )
        if not self._lines.read() and any(others):
            raise FolderTakenError(
                f"{self.path} is not empty and not a figure's; choose another "
                "folder with --output"
            )

    def _require_same(self) -> None:
        if not (lines := self._lines.read()):
            self._lines.append(self.identity)
            return
        now, before = dict(dotted(self.identity)), dict(dotted(lines[0]))
        keys = sorted(now.keys() | before.keys())
        if other := [key for key in keys if now.get(key) != before.get(key)]:
            raise FolderTakenError(
                f"{self.path} holds a figure with another {', '.join(other)}; give the "
                "same again, delete the folder to start again, or choose another "
                "folder with --output"
            )
