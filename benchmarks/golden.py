"""Freeze the results of tiny runs, and compare them after a change.

    python -m benchmarks.golden freeze FOLDER [--all]
    python -m benchmarks.golden compare FOLDER [--all] [--only 'serial fedem']

Runs every method of the catalogue alone and with kNN, every personalization on FedAvg
(with --all: on each method), the variants of golden.yaml, and a few on the flower
engine. ``freeze`` writes one JSON file with the fingerprint of each final global state,
a hash of each column of clients.csv, and all figures of results.json and rounds.jsonl
except seconds. ``compare`` runs again and prints each difference; its exit status is 1
if there is one. New figures and new names are only notes.

Uses only the command line, experiment files and run folders, so that code may move.
Hashes are comparable only on the same kind of processor with the same versions, which
are recorded in the file.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import platform
import re
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measurement import say

ROOT = Path(__file__).parents[1]
CHOSEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
Document = Mapping[str, Any]
FILE, COMPARED = "golden.json", "compared.json"
PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "faiss-cpu")


def knnper(*words: str) -> str:
    """Run a command in this process and return its standard output."""
    # The command of this tree, since the installed one may belong to another tree.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    place = project["scripts"]["knnper"]
    main: Callable[[], None] = EntryPoint("knnper", place, "console_scripts").load()
    out = io.StringIO()
    err = io.StringIO()
    typed = sys.argv
    sys.argv = ["knnper", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        if ended.code:
            ended.add_note(err.getvalue())
            raise
    finally:
        sys.argv = typed
    return out.getvalue()


def experiments() -> dict[str, Document]:
    """Return the experiments of the runs on the serial engine, by name."""
    base: dict[str, Any] = CHOSEN["experiment"]
    with_knn = {"personalization": {"name": "knn"}}
    documents: dict[str, Document] = {}
    listed = json.loads(knnper("list", "methods", "--json"))
    for method in listed["methods"]:
        name, personalization = method["name"], method["personalization"]
        documents[name] = {**base, "method": {"name": name}}
        for choice in listed["personalizations"] if personalization == "none" else ():
            if choice["name"] != personalization:
                on_top = {"personalization": {"name": choice["name"]}}
                documents[f"{name} + {choice['name']}"] = {**documents[name], **on_top}
    for name, sections in CHOSEN["variants"].items():
        documents[f"variant {name}"] = {**base, **with_knn, **sections}
    return documents


def write_data() -> None:
    """Write the small table and the text for the variants."""
    rows = [(row, row % 6, row * 37 % 101, row * 53 % 89) for row in range(240)]
    lines = [f"{n},c{client},{a},{b},{(a + 2 * b) // 93}" for n, client, a, b in rows]
    Path("rows.csv").write_text("\n".join(["row,client,a,b,label", *lines]))
    speeches = [
        "".join("a word or two "[(n * i * i + i // 7) % 14] for i in range(500))
        for n in range(9)
    ]
    speakers = {f"speaker {n}": words for n, words in enumerate(speeches)}
    Path("plays.json").write_text(json.dumps(speakers))


def digest(text: str) -> str:
    """Return the first digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def figures(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the path and value of each figure of a JSON document, except seconds."""
    if isinstance(value, int | float) and "seconds" not in path:
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from figures(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for position, inner in enumerate(value, 1):
            yield from figures(inner, f"{path}[{position}]")


def outcome(folder: Path) -> dict[str, Any]:
    """Return the figures and hashes of a run that must not change."""
    results = json.loads((folder / "results.json").read_text())
    del results["manifest"]  # time and environment of the run
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    rows = [*csv.DictReader((folder / "clients.csv").read_text().splitlines())]
    columns = {
        name: digest("\n".join(row[name] for row in rows))
        for name in rows[0]
        if "seconds" not in name
    }
    return {
        "state": results["training"]["state_sha256"],
        "clients.csv": columns,
        "figures": dict(figures({**results, "round": [*map(json.loads, lines)]})),
    }


def one_run(name: str, engine: str, experiment: Document) -> dict[str, Any]:
    """Run an experiment and return its outcome, or its error."""
    Path("experiment.yaml").write_text(json.dumps(experiment))
    folder = Path(digest(f"{engine} {name}"))
    workers = ("--workers", "2") if engine == "flower" else ()
    words = ("experiment.yaml", "--output", str(folder), "--engine", engine, *workers)
    try:
        knnper("simulate", *words)
        return outcome(folder)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (continue with others)
        why = getattr(error, "code", type(error).__name__)
        return {"failed": why, "said": traceback.format_exc().splitlines()[-8:]}


def all_runs(is_selected: Callable[[str], bool]) -> dict[str, Any]:
    """Return the outcome of every selected run, by engine and name."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        os.environ["KNNPER_CACHE"] = str(Path(place) / "cache")
        write_data()
        serial = experiments()
        plan = [("serial", name) for name in serial]
        plan += [("flower", name) for name in CHOSEN["on_flower"]]
        plan = [
            (engine, name) for engine, name in plan if is_selected(f"{engine} {name}")
        ]
        for number, (engine, name) in enumerate(plan, 1):
            start = time.perf_counter()
            key = f"{engine} {name}"
            # A method that is missing in the catalogue fails with an error that names
            # it.
            unknown = {**CHOSEN["experiment"], "method": {"name": name}}
            outcomes[key] = one_run(name, engine, serial.get(name, unknown))
            took, failed = time.perf_counter() - start, "failed" in outcomes[key]
            say(f"{number}/{len(plan)}  {took:.1f} s  {key}{'  FAILED' * failed}")
    return outcomes


def machine() -> dict[str, str]:
    """Return the processor and versions, which determine the last bits of floats."""
    import torch

    cpu = Path("/proc/cpuinfo")
    fields = dict(
        re.findall(r"(.*\S)\s*: (.*)", cpu.read_text() if cpu.exists() else "")
    )
    return {
        "processor": fields.get("model name", platform.processor()),
        "processor flags": digest(fields.get("flags", platform.machine())),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def differences(old: Document, new: Document) -> Iterator[tuple[str, bool]]:
    """Yield the differences of two mappings, and whether each is more than a note."""
    removed = [key for key in old if key not in new]
    added = [key for key in new if key not in old]
    for key in removed:
        same = [other for other in added if new[other] == old[key]][:1]
        added = [other for other in added if other not in same]
        yield f"{key} is {f'now called {same[0]}' if same else 'gone'}", not same
    for key in added:
        yield f"{key} is new", False
    for key in old.keys() & new.keys() - {"said"}:
        if isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            for text, is_value in differences(old[key], new[key]):
                yield f"{key}: {text}", is_value
        elif old[key] != new[key]:
            yield f"{key}: was {old[key]}, is {new[key]}", True


def compare(old: Document, new: Document) -> int:
    """Print the differences between two files; return the number of changed values."""
    for text, _ in differences(old["machine"], new["machine"]):
        print(f"ANOTHER MACHINE, hashes need not be equal: {text}")
    for key, run in new["runs"].items():
        if "failed" in run and "failed" not in old["runs"].get(key, run):
            print(f"{key} fails: {run['failed']}", *run["said"], sep="\n  ")
    changes = list(differences(old["runs"], new["runs"]))
    # A note shared by many runs, such as a renamed figure, is printed once.
    notes = [
        re.sub(r"^[^:]*: ", "", text) for text, is_value in changes if not is_value
    ]
    for text, count in Counter(notes).items():
        print(f"note ({count} times): {text}")
    changed = sorted(text for text, is_value in changes if is_value)
    print(*changed, f"{len(new['runs'])} runs: {len(changed)} differences", sep="\n")
    return len(changed)


def main() -> int:
    """Freeze or compare; return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("action", choices=("freeze", "compare"))
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".golden")
    parser.add_argument("--all", action="store_true", help="three times as many runs")
    parser.add_argument("--only", default="", help="runs that this expression is in")
    options = parser.parse_args()

    def is_selected(key: str) -> bool:
        usual = " + " not in key or " fedavg " in key or key.endswith(" + knn")
        return (usual or options.all) and re.search(options.only, key) is not None

    frozen: Path = options.folder.resolve() / FILE
    is_new = options.action == "freeze"
    if not is_new and not frozen.exists():
        parser.error(f"{frozen} is missing; first: python -m benchmarks.golden freeze")
    start = time.perf_counter()
    document = {"machine": machine(), "runs": all_runs(is_selected)}
    say(f"it took {time.perf_counter() - start:.0f} s")
    frozen.parent.mkdir(parents=True, exist_ok=True)
    target = frozen if is_new else frozen.with_name(COMPARED)
    target.write_text(json.dumps(document, indent=1) + "\n")
    if is_new:
        return 0
    old = json.loads(frozen.read_text())
    old["runs"] = {key: run for key, run in old["runs"].items() if is_selected(key)}
    return 1 if compare(old, document) else 0


if __name__ == "__main__":
    sys.exit(main())
