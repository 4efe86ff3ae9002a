"""The YAML files of figures, comparisons, sweeps and experiments."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper import ConfigError, Experiment, Problem
from knnper.experiment_file import read_experiment
from knnper.settings import shown
from knnper.simulation.batches.comparison import Comparison, read_comparison
from knnper.simulation.batches.sweep import Sweep, read_sweep
from knnper.simulation.catalogue import experiment_catalogue
from knnper.yaml_text import read_yaml
from papers.catalogue import FigurePlan, read_figure

_LONGEST_TITLE = 140  # in characters: two lines of a page
Plan = Experiment | Sweep | Comparison | FigurePlan
# Names in the output folder beside the folders of the files.
RUNS = "runs"
REPORT = "report"
SECONDS = "seconds.jsonl"
ERRORS = "errors"
RESERVED = (RUNS, f"{REPORT}.html", f"{REPORT}.md", SECONDS, ERRORS)
# Kind -> (keys by which it is recognised, reader).
KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[Path], Plan]]] = {
    "figure": (("figure",), read_figure),
    "comparison": (("rows", "extends"), read_comparison),
    "sweep": (("grid", "variants", "random"), read_sweep),
    "experiment": (
        ("data",),
        lambda path: read_experiment(path, experiment_catalogue()),
    ),
}


@dataclass(frozen=True)
class Paragraph:
    """Lines of one paragraph or listing of a comment."""

    text: str
    is_listing: bool


def leading_comment(text: str) -> tuple[Paragraph, ...]:
    """Return the paragraphs of the comment at the beginning of a YAML file."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line[1:].removeprefix(" ").rstrip() for line in comment]
    grouped = itertools.groupby(lines, lambda line: (not line, line.startswith("  ")))
    return tuple(
        Paragraph(("\n" if indented else " ").join(map(str.strip, group)), indented)
        for (blank, indented), group in grouped
        if not blank
    )


def split_title(comment: Sequence[Paragraph]) -> tuple[str, Sequence[Paragraph]]:
    """Return the title of a file (its first sentence) and the following paragraphs."""
    if not comment or comment[0].is_listing:
        return "", comment
    text = comment[0].text
    title = text.rstrip(".:")
    # The full stop of "et al." does not end a sentence.
    if len(title) > _LONGEST_TITLE or ". " in title.replace("et al. ", ""):
        return "", comment
    return title, comment[1:]


@dataclass(frozen=True)
class File:
    """A validated file: path, content, kind and parsed plan."""

    path: Path
    text: str
    name: str
    kind: str
    plan: Plan


def read_files(paths: Sequence[Path]) -> list[File]:
    """Read and validate files in order."""
    files = list[File]()
    problems = list[Problem]()
    for path in paths:
        try:
            files.append(read_file(path))
        except ConfigError as error:
            problems.extend(
                Problem(f"{path}: {problem.place}", problem.message)
                for problem in error.problems
            )
    problems.extend(_name_problems(files))
    if problems:
        raise ConfigError(problems, "the files")
    return files


def read_file(path: Path) -> File:
    """Read a YAML file of any kind."""
    document = read_yaml(path)
    keys = document.keys() if isinstance(document, Mapping) else set()
    kind = next(
        (kind for kind, (key_names, _) in KINDS.items() if keys & set(key_names)), None
    )
    if kind is None:
        kinds = (
            f"{kind_name}: {' or '.join(key_names)}"
            for kind_name, (key_names, _) in KINDS.items()
        )
        known = "; ".join(kinds)
        shown_keys = (
            f"the keys {', '.join(map(str, keys))}" if keys else shown(document)
        )
        message = f"found {shown_keys}, expected a key that only one kind has ({known})"
        raise ConfigError([Problem("document", message)], str(path))
    plan = KINDS[kind][1](path)
    return File(path, path.read_text(encoding="utf-8"), plan.name, kind, plan)


def _name_problems(files: Iterable[File]) -> Iterator[Problem]:
    """Yield a problem for files that would share a folder."""
    # Some file systems ignore the case of names.
    by_name: defaultdict[str, list[File]] = defaultdict(list)
    for file in files:
        by_name[file.name.casefold()].append(file)
        if file.name.casefold() in RESERVED:
            message = f"found {file.name!r}, expected another name: the report needs it"
            yield Problem(f"{file.path}: name", message)
    for same in by_name.values():
        if len(same) > 1:
            paths = ", ".join(str(file.path) for file in same)
            message = f"{paths} share it, expected a name for each; change one"
            yield Problem(f"name {same[0].name}", message)
