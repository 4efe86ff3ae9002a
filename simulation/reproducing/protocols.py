"""Protocol files of all kinds: read and validated, before the first is played."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from knnper.config.errors import ConfigError, Problem
from knnper.config.loading import read_experiment
from knnper.config.sections import Experiment
from knnper.config.suggestions import shown
from knnper.config.yaml_text import read_yaml
from simulation.catalogue import experiment_catalogue
from simulation.comparison.plan import Comparison, read_comparison
from simulation.reproducing.figure_file import FigurePlan, read_figure
from simulation.reproducing.leading_comment import Paragraph, leading_comment
from simulation.sweep.plan import Sweep, read_sweep

Plan = Experiment | Sweep | Comparison | FigurePlan

RUNS = "runs"
REPORT = "report"
SECONDS = "seconds.jsonl"
ERRORS = "errors"
RESERVED = (RUNS, f"{REPORT}.html", f"{REPORT}.md", SECONDS, ERRORS)
"""Names of what stands in the output folder beside the files' own folders."""


@dataclass(frozen=True)
class Protocol:
    """One file, validated.

    Attributes
    ----------
    path
        The file.
    text
        Its content.
    name
        Of its folder.
    kind
        What it is, in one word.
    plan
        What it says.
    """

    path: Path
    text: str
    name: str
    kind: str
    plan: Plan

    @property
    def about(self) -> tuple[Paragraph, ...]:
        """What the file says about itself at its top."""
        return leading_comment(self.text)


def _read_experiment(path: Path) -> Experiment:
    return read_experiment(path, experiment_catalogue())


@dataclass(frozen=True)
class _Kind:
    """What a file can be, told by any of its keys."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Path], Plan]


_KINDS = (
    _Kind("figure", ("figure",), read_figure),
    _Kind("comparison", ("rows",), read_comparison),
    _Kind("sweep", ("vary", "variants", "random"), read_sweep),
    _Kind("experiment", ("data",), _read_experiment),
)


def read_protocols(paths: Sequence[Path]) -> list[Protocol]:
    """Return what the files say, in their order.

    Raises
    ------
    ConfigError
        With all that is wrong with any of them, and if two have the same name.
    """
    found, problems = list[Protocol](), list[Problem]()
    for path in paths:
        try:
            found.append(read_protocol(path))
        except ConfigError as error:
            problems.extend(
                Problem(f"{path}: {one.place}", one.message) for one in error.problems
            )
    problems.extend(_name_problems(found))
    if problems:
        raise ConfigError(problems, "the files")
    return found


def read_protocol(path: Path) -> Protocol:
    """Return what the YAML file at ``path`` says, whatever its kind.

    Raises
    ------
    ConfigError
        If it is of no kind, or with all that is wrong with it.
    """
    document = read_yaml(path)
    kind = _kind_of(document, path)
    plan = kind.read(path)
    text = path.read_text(encoding="utf-8")
    return Protocol(path, text, _name_of(plan), kind.name, plan)


def _name_of(plan: Plan) -> str:
    return plan.settings.name if isinstance(plan, Sweep) else plan.name


def _kind_of(document: object, path: Path) -> _Kind:
    keys = document.keys() if isinstance(document, Mapping) else set()
    for kind in _KINDS:
        if keys & set(kind.keys):
            return kind
    known = "; ".join(f"{one.name}: {' or '.join(one.keys)}" for one in _KINDS)
    found = f"the keys {', '.join(map(str, keys))}" if keys else shown(document)
    message = f"found {found}, expected a key that tells its kind ({known})"
    raise ConfigError([Problem("document", message)], str(path))


def _name_problems(protocols: Iterable[Protocol]) -> Iterable[Problem]:
    """Yield which files would share a folder."""
    # Some file systems take two names for one that differ in their case alone.
    files: defaultdict[str, list[Protocol]] = defaultdict(list)
    for one in protocols:
        files[one.name.casefold()].append(one)
        if one.name.casefold() in RESERVED:
            message = f"found {one.name!r}, expected another name: the report needs it"
            yield Problem(f"{one.path}: name", message)
    for same in files.values():
        if len(same) > 1:
            paths = ", ".join(str(one.path) for one in same)
            message = f"{paths} share it, expected a name for each; change one"
            yield Problem(f"name {same[0].name}", message)


KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {kind.name: kind.keys for kind in _KINDS}
)
"""From each kind to the keys that tell it."""
