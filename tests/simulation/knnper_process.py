"""The command that a user types, and the processes that one starts."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.processes import KNNPER


def simulate(*arguments: str | Path) -> None:
    """Run ``knnper simulate`` to its end."""
    command = [KNNPER, "simulate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def outcome(folder: Path) -> tuple[str, bytes, bytes | None]:
    """Return what must be the same: the last state's digest, and files of clients."""
    results = json.loads((folder / "results.json").read_text())
    digest: str = results["training"]["state_sha256"]
    predicted = folder / "predictions.parquet"
    clients = (folder / "clients.csv").read_bytes()
    return digest, clients, predicted.read_bytes() if predicted.exists() else None


def validations(folder: Path) -> list[tuple[float, float] | None]:
    """Return by round how the models did on validation data, global and own."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    names = ("validation_accuracy", "validation_accuracy_personal")
    return [
        tuple(record[name] for name in names) if names[0] in record else None
        for record in map(json.loads, lines)
    ]


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield process id and name of all processes that ``pid`` started, and theirs."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for path in list(Path(f"/proc/{pid}/task").glob("*/children")):
            for child in map(int, path.read_text().split()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    name = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]
                    yield child, name.decode()
                yield from descendants(child)
