"""The files of results in ``docs/results/``, read for the tables of the pages.

``docs/results/NAME.csv`` is the table.csv of `knnper compare` or `knnper sweep` for the
shipped file NAME.yaml. ``docs/results/points/NAME.csv`` is the points.csv, with a line
for each row and seed.
"""

import csv
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.text import as_text, term_of
from papers.files import leading_comment, split_title

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = DOCS / "results"
POINTS = "points"  # folder of the results of each seed
PLACES = ("simulation/experiments", "papers", "papers/small")
GROUPS = ("seen", "unseen")
# Of a sweep's file, which has more figures than a comparison's, under other names.
_SWEPT = re.compile(
    r"(seen|unseen|all)\.(global\.)?(\w+?)(_vs_\w+)?(\.sd|\.half_width)?"
)
_SHORT = {"accuracy_weighted": "average", "accuracy_bottom_decile": "bottom_decile"}
_ENDS = {".sd": "_std", ".half_width": "_half_width", None: ""}


@dataclass(frozen=True)
class Result:
    """A row of a file: a method, or one value of a varied setting."""

    name: str
    title: str
    settings: Mapping[str, Any]  # chosen or varied settings
    line: Mapping[str, str]  # by column, under a comparison's names

    def figure(self, column: str) -> Estimate:
        """Return the mean and half of the 95 % interval of a column."""
        names = (column, f"{column}_std", f"{column}_half_width")
        mean, std, half = (
            float(text) if (text := self.line.get(name)) else None for name in names
        )
        return Estimate(mean, std, half, len(self.line["seeds"].split()))

    @property
    def has_memory(self) -> bool:
        """Whether clients use stored examples."""
        return "knn" in self.line["personalization_name"]

    @property
    def settings_text(self) -> str:
        """Chosen or varied settings as text."""
        pairs = self.settings.items()
        return ", ".join(f"{term_of(key)} {as_text(value)}" for key, value in pairs)


@dataclass(frozen=True)
class Results:
    """The rows of a file of results."""

    name: str
    results: Sequence[Result]
    is_sweep: bool

    @functools.cached_property
    def source(self) -> Path:
        """The shipped experiment file of these results."""
        for place in PLACES:
            if (path := ROOT / place / f"{self.name}.yaml").is_file():
                return path
        raise SystemExit(
            f"docs/results/{self.name}.csv: found no {self.name}.yaml in "
            f"{', '.join(PLACES)}; name it as the file that it is the table of"
        )

    @property
    def title(self) -> str:
        """Title in the shipped file."""
        comment = leading_comment(self.source.read_text(encoding="utf-8"))
        return split_title(comment)[0] or self.name

    @property
    def command(self) -> str:
        """Command in the shipped file that makes these results."""
        text = self.source.read_text(encoding="utf-8")
        pattern = rf"^#   ((?:knnper|python -m papers) \w+ .*\b{self.name}\b.*)$"
        match = re.search(pattern, text, re.MULTILINE)
        if match is None:
            raise SystemExit(f"{self.source}: found no command in its first comment")
        return match[1]

    @functools.cached_property
    def titles(self) -> dict[str, str]:
        """Titles of the rows by name."""
        return {result.name: result.title for result in self.results}

    @property
    def origin(self) -> Mapping[str, str]:
        """Partition, model and versions of the first row with results."""
        return next(result.line for result in self.results if result.line["seeds"])

    @functools.cached_property
    def references(self) -> list[str]:
        """Rows to which the averages of the other rows are compared."""
        columns = self.results[0].line
        named = (re.fullmatch(r"seen_vs_(\w+)", reference) for reference in columns)
        names = [reference[1] for reference in named if reference]
        return [
            reference
            for reference in names
            if re.sub("_(std|half_width)$", "", reference) == reference
        ]

    def reference(self, method: str, personalization: str) -> str | None:
        """Return the first reference with this method and this personaliser."""
        for name in self.references:
            line = next(result.line for result in self.results if result.name == name)
            key = line["method_name"], line["personalization_name"]
            if key == (method, personalization):
                return name
        return None


def read_results(path: Path) -> Results:
    """Read a file of results."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    is_sweep = "variant" in lines[0]
    return Results(path.stem, [_result(line, is_sweep) for line in lines], is_sweep)


def _result(line: Mapping[str, str], is_sweep: bool) -> Result:
    if not is_sweep:
        return Result(line["row"], line["method"], json.loads(line["chosen"]), line)
    figures, varied = _swept(line)
    return Result(line["variant"], line["title"], varied, figures)


def _swept(line: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a sweep's figures under a comparison's names, and its varied settings."""
    figures, varied = dict[str, str](), dict[str, Any]()
    for key, text in line.items():
        if swept := _SWEPT.fullmatch(key):
            group, of_global, figure, versus, end = swept.groups()
            named = _SHORT.get(figure, figure)
            middle = versus or f"_{'global_' if of_global else ''}{named}"
            figures[f"{group}{middle}{_ENDS[end]}"] = text
        elif "." in key and not key.endswith(tuple(filter(None, _ENDS))):
            varied[key] = yaml.safe_load(text)
        else:
            for end, other in _ENDS.items():
                if end is not None and key.endswith(end):
                    key = key.removesuffix(end) + other
            figures[key] = text
    return figures, varied


@dataclass(frozen=True)
class PointLine:
    """A row of a file of points: one run."""

    name: str  # of the method or the variant
    seed: str
    settings: Mapping[str, Any]  # what a sweep varies
    line: Mapping[str, str]  # by column, under a comparison's names

    def figure(self, column: str) -> float | None:
        """Return a figure; None if the run failed or lacks it."""
        text = self.line[column]
        return float(text) if text else None


def read_points(path: Path) -> list[PointLine]:
    """Read the runs in a file of points."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    if "variant" not in lines[0]:
        return [PointLine(line["row"], line["seed"], {}, line) for line in lines]
    points = []
    for line in lines:
        figures, varied = _swept(line)
        points.append(PointLine(line["variant"], line["seed"], varied, figures))
    return points


def differences(
    points: Sequence[PointLine], first: str, second: str, column: str
) -> list[tuple[Mapping[str, Any], Estimate]]:
    """Return ``first`` minus ``second``, seed by seed, for each varied value."""
    values_of: dict[str, tuple[Mapping[str, Any], list[float | None]]] = {}
    at = {
        (point.name, point.seed, as_text(dict(point.settings))): point
        for point in points
    }
    for (name, seed, place), point in at.items():
        if name != first:
            continue
        other = at[second, seed, place].figure(column)
        mine = point.figure(column)
        gain = None if mine is None or other is None else mine - other
        values_of.setdefault(place, (point.settings, []))[1].append(gain)
    return [(settings, estimate(gains)) for settings, gains in values_of.values()]


def all_results(folder: Path = RESULTS) -> list[Results]:
    """Read the files of a folder by name."""
    return [read_results(path) for path in sorted(folder.glob("*.csv"))]
