"""Keep every number: freeze what tiny runs give, and compare it after a change.

    python -m benchmarks.golden freeze FOLDER [--all]
    python -m benchmarks.golden compare FOLDER [--all] [--only 'serial fedem']

Runs every method of the catalogue alone and with kNN, every personalization on FedAvg
(with --all: on each method), the variants of golden.yaml, and a few on the flower
engine. ``freeze`` writes one JSON file with the fingerprint of each final global state,
a hash of each column of clients.csv, and all figures of results.json and rounds.jsonl
but seconds. ``compare`` runs again and prints each difference; its exit status is 1 if
there is one. What only has another name, or is new, is a note.

Only the command line, experiment files and run folders are used: code may move. Hashes
compare only on one kind of processor with the same versions; both are in the file.
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
    """Return what a command writes to standard output; it runs in this process."""
    # The command that this tree declares: what is installed may be of another tree.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    place = project["scripts"]["knnper"]
    main: Callable[[], None] = EntryPoint("knnper", place, "console_scripts").load()
    out, err, typed = io.StringIO(), io.StringIO(), sys.argv
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
    """Return the experiment of each run on the serial engine."""
    base: dict[str, Any] = CHOSEN["experiment"]
    with_knn = {"personalization": {"name": "knn"}}
    found: dict[str, Document] = {}
    listed = json.loads(knnper("list", "methods", "--json"))
    for method in listed["methods"]:
        name, own = method["name"], method["personalization"]
        found[name] = {**base, "method": {"name": name}}
        for choice in listed["personalizations"] if own == "none" else ():
            if choice["name"] != own:
                on_top = {"personalization": {"name": choice["name"]}}
                found[f"{name} + {choice['name']}"] = {**found[name], **on_top}
    for name, sections in CHOSEN["variants"].items():
        found[f"variant {name}"] = {**base, **with_knn, **sections}
    return found


def write_data() -> None:
    """Write the small table and the text of the variants, the same everywhere."""
    rows = [(row, row % 6, row * 37 % 101, row * 53 % 89) for row in range(240)]
    lines = [f"{n},c{client},{a},{b},{(a + 2 * b) // 93}" for n, client, a, b in rows]
    Path("rows.csv").write_text("\n".join(["row,client,a,b,label", *lines]))
    said = [
        "".join("a word or two "[(n * i * i + i // 7) % 14] for i in range(500))
        for n in range(9)
    ]
    speakers = {f"speaker {n}": words for n, words in enumerate(said)}
    Path("plays.json").write_text(json.dumps(speakers))


def digest(text: str) -> str:
    """Return the start of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def figures(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield each figure of a JSON document, but seconds, with where it stands."""
    if isinstance(value, int | float) and "seconds" not in path:
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from figures(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for position, inner in enumerate(value, 1):
            yield from figures(inner, f"{path}[{position}]")


def outcome(folder: Path) -> dict[str, Any]:
    """Return what must stay the same of a run."""
    results = json.loads((folder / "results.json").read_text())
    del results["manifest"]  # When and from what it was made.
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
    """Return the outcome of an experiment, or how it failed."""
    Path("experiment.yaml").write_text(json.dumps(experiment))
    folder = Path(digest(f"{engine} {name}"))
    workers = ("--workers", "2") if engine == "flower" else ()
    words = ("experiment.yaml", "--output", str(folder), "--engine", engine, *workers)
    try:
        knnper("simulate", *words)
        return outcome(folder)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the next is to run anyway)
        why = getattr(error, "code", type(error).__name__)
        return {"failed": why, "said": traceback.format_exc().splitlines()[-8:]}


def all_runs(wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Return the outcome of every wanted run, by engine and name."""
    found = {}
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        os.environ["KNNPER_CACHE"] = str(Path(place) / "cache")
        write_data()
        serial = experiments()
        plan = [("serial", name) for name in serial]
        plan += [("flower", name) for name in CHOSEN["on_flower"]]
        plan = [(engine, name) for engine, name in plan if wanted(f"{engine} {name}")]
        for number, (engine, name) in enumerate(plan, 1):
            start, key = time.perf_counter(), f"{engine} {name}"
            # One that is gone from the catalogue fails, and is told what there is.
            gone = {**CHOSEN["experiment"], "method": {"name": name}}
            found[key] = one_run(name, engine, serial.get(name, gone))
            took, failed = time.perf_counter() - start, "failed" in found[key]
            say(f"{number}/{len(plan)}  {took:.1f} s  {key}{'  FAILED' * failed}")
    return found


def machine() -> dict[str, str]:
    """Return what decides the last bits of a float."""
    import torch

    cpu = Path("/proc/cpuinfo")
    told = dict(re.findall(r"(.*\S)\s*: (.*)", cpu.read_text() if cpu.exists() else ""))
    return {
        "processor": told.get("model name", platform.processor()),
        "processor flags": digest(told.get("flags", platform.machine())),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def differences(old: Document, new: Document) -> Iterator[tuple[str, bool]]:
    """Yield what two mappings differ in, and whether it is a value or only a note."""
    gone = [key for key in old if key not in new]
    added = [key for key in new if key not in old]
    for key in gone:
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
    """Print what differs between two files; return how many values do."""
    for text, _ in differences(old["machine"], new["machine"]):
        print(f"ANOTHER MACHINE, hashes need not be equal: {text}")
    for key, run in new["runs"].items():
        if "failed" in run and "failed" not in old["runs"].get(key, run):
            print(f"{key} fails: {run['failed']}", *run["said"], sep="\n  ")
    found = list(differences(old["runs"], new["runs"]))
    # The same note of many runs, as another name of a figure, is one line.
    notes = [re.sub(r"^[^:]*: ", "", text) for text, is_value in found if not is_value]
    for text, count in Counter(notes).items():
        print(f"note ({count} times): {text}")
    changed = sorted(text for text, is_value in found if is_value)
    print(*changed, f"{len(new['runs'])} runs: {len(changed)} differences", sep="\n")
    return len(changed)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("action", choices=("freeze", "compare"))
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".golden")
    parser.add_argument("--all", action="store_true", help="three times as many runs")
    parser.add_argument("--only", default="", help="runs that this expression is in")
    options = parser.parse_args()

    def wanted(key: str) -> bool:
        usual = " + " not in key or " fedavg " in key or key.endswith(" + knn")
        return (usual or options.all) and re.search(options.only, key) is not None

    frozen: Path = options.folder.resolve() / FILE
    is_new = options.action == "freeze"
    if not is_new and not frozen.exists():
        parser.error(f"{frozen} is missing; first: python -m benchmarks.golden freeze")
    start = time.perf_counter()
    document = {"machine": machine(), "runs": all_runs(wanted)}
    say(f"it took {time.perf_counter() - start:.0f} s")
    frozen.parent.mkdir(parents=True, exist_ok=True)
    target = frozen if is_new else frozen.with_name(COMPARED)
    target.write_text(json.dumps(document, indent=1) + "\n")
    if is_new:
        return 0
    old = json.loads(frozen.read_text())
    old["runs"] = {key: run for key, run in old["runs"].items() if wanted(key)}
    return 1 if compare(old, document) else 0


if __name__ == "__main__":
    sys.exit(main())
