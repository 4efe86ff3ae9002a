"""Runs with damaged files: `knnper report` names the file in one line."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import RunError
from knnper.simulation.label_counts import read_label_counts
from knnper.simulation.reports.client_table import read_clients
from knnper.simulation.reports.finished_run import load_run
from tests.processes import KNNPER
from tests.simulation.reporting.made_runs import made_run

DEEP = 5000
WRONG: tuple[Any, ...] = (
    "text",
    [],
    {"a": [1]},
    True,
    -1,
    10**40,
    1e300,
    float("nan"),
    [[1]],
)
COUNTS = {
    "class_names": ["cat", "dog"],
    "clients": [
        {"client": "0000", "seen": True, "train": [1, 2], "validation": [0, 1]}
        | {"test": [1, 1]}
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = made_run(tmp_path / "run")
    (folder / "partition.json").write_text(json.dumps(COUNTS))
    return folder


def read_all(folder: Path) -> None:
    """Read each file of a run as reports do."""
    read_documents(folder)
    read_clients(folder)


def read_documents(folder: Path) -> None:
    """Read the JSON files of a run as reports do."""
    run = load_run(folder)
    for group in ("seen", "unseen", "all"):
        figures = run.figures(group)
        sum(
            figure
            for figure in (figures["num_clients"], figures["accuracy_mean"])
            if figure
        )
    for record in run.folder.rounds():
        float(record["server_round"] + (record.get("train_loss") or 0.0))
    counts = read_label_counts(folder)
    assert counts is not None
    counts.local.sum()


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where values are in a document; of a list the first one alone."""
    if place:
        yield place
    if isinstance(value, Mapping):
        for key in value:
            yield from places(value[key], (*place, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*place, 0))


def changed(document: Any, place: Sequence[Any], value: Any) -> Any:
    result = deepcopy(document)
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return result


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_document(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def write_lines(path: Path, records: Any) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


READ: Mapping[str, tuple[Callable[[Path], Any], Callable[[Path, Any], None]]] = {
    "results.json": (lambda path: json.loads(path.read_text()), write_document),
    "partition.json": (lambda path: json.loads(path.read_text()), write_document),
    "rounds.jsonl": (lines_of, write_lines),
    "personalization.jsonl": (lines_of, write_lines),
}


@pytest.mark.parametrize("name", READ)
def test_wrong_value_anywhere_is_an_error_that_names_the_file(
    run: Path, name: str
) -> None:
    read, write = READ[name]
    document = read(run / name)
    read_documents(run)
    refused: list[str] = []
    for place in places(document):
        for value in WRONG:
            write(run / name, changed(document, place, value))
            try:
                read_documents(run)
            except RunError as error:
                refused.append(str(error))
    assert len(refused) > len(list(places(document)))
    assert all(name in message for message in refused)


CONTENTS = {
    "empty": b"",
    "text": b'"text"\n',
    "no UTF-8": b"\xff\xfe\n",
    "deep": DEEP * b'{"a":' + b"1" + DEEP * b"}" + b"\n",
    "an endless line": 2_000_000 * b"x" + b"\n",
    "a long number": b'{"server_round": ' + 5000 * b"9" + b"}\n",
}


@pytest.mark.parametrize("name", ["results.json", "rounds.jsonl", "clients.csv"])
@pytest.mark.parametrize("content", CONTENTS)
def test_content_of_another_kind(run: Path, name: str, content: str) -> None:
    (run / name).write_bytes(CONTENTS[content])
    if (name, content) == ("rounds.jsonl", "empty"):
        return  # a run without rounds
    with pytest.raises(RunError, match=name):
        read_all(run)


@pytest.mark.parametrize(
    ("pattern", "cell"),
    [
        (r"^(0001,\w+,\d+,\d+,)\d+", r"\g<1>many"),
        (r"^(0001,\w+,\d+,\d+,)\d+", r"\g<1>-1"),
        (r"^(0001,\w+,\d+,\d+,\d+,)[^,]+", r"\g<1>nan"),
        (r"^(0001,\w+,\d+,\d+,\d+,)[^,]+", r"\g<1>1e300"),
        (r"^0001,", "0001" + 200_000 * "x" + ","),
        (r"^(0001,.*),[^,]*,[^,]*$", r"\g<1>"),
        (r"^(0001,.*)$", r"\g<1>,1"),
        (r"^client,", "name,"),
    ],
)
def test_damaged_clients_csv(run: Path, pattern: str, cell: str) -> None:
    path = run / "clients.csv"
    text, count = re.subn(pattern, cell, path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    with pytest.raises(RunError, match=r"clients\.csv is missing or damaged"):
        read_all(run)


@pytest.mark.slow
def test_report_names_the_damaged_file_in_one_line(tmp_path: Path) -> None:
    """As typed: each damage in a run of its own, a process each."""
    damages = {
        "results.json": [
            *(CONTENTS["text"], CONTENTS["deep"]),
            b'{"method": 3, "seen": [], "unseen": "x", "training": 1, "manifest": []}',
        ],
        "rounds.jsonl": [CONTENTS["deep"], b'{"server_round": "one"}\n'],
        "clients.csv": [b"client,accuracy\n" + 200_000 * b"x" + b",1\n"],
    }
    for name, contents in damages.items():
        for number, content in enumerate(contents):
            folder = made_run(tmp_path / f"{name}-{number}")
            (folder / name).write_bytes(content)
            command = map(str, [KNNPER, "report", folder, "--html", tmp_path / "x"])
            ended = subprocess.run(
                [*command], capture_output=True, text=True, check=False
            )
            assert ended.returncode == 1, ended.stderr
            lines = [line for line in ended.stderr.splitlines() if line]
            assert len(lines) == 1, ended.stderr
            assert lines[0].startswith("Error: ")
            assert name in lines[0]
