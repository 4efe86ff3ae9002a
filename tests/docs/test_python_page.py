"""The public Python interface: what it holds, what it costs, and its page."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import knnper

PAGE = "docs/python.md"
PUBLIC = [
    *("ClientData", "ConfigError", "DataError", "DataFormat", "Dataset"),
    *("EmbeddingModel", "Examples", "Experiment", "FedAvg", "InputSpec", "KnnPerError"),
    *("LabelledArrays", "LocalMemory", "Method", "NeighborTable", "OwnCodeError"),
    *(
        "Personalizer",
        "RandomKey",
        "Run",
        "RunError",
        "Settings",
        "StoreError",
        "simulate",
    ),
]


def test_the_public_names_are_these(
    tables: Callable[[str], dict[tuple[str, str], dict[str, list[str]]]],
) -> None:
    # Who takes one away, or renames it, breaks what users have written.
    assert knnper.__all__ == PUBLIC
    assert {*PUBLIC} <= {*dir(knnper)}
    assert {*tables(PAGE)["What is public", ""]} == {*PUBLIC}
    for name in PUBLIC:
        assert inspect.getdoc(getattr(knnper, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = knnper.simulat  # type: ignore[attr-defined]


def test_type_checkers_see_what_is_imported() -> None:
    tree = ast.parse(Path(knnper.__file__).read_text(encoding="utf-8"))
    seen = {
        one.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("knnper.")
        for one in node.names
    }
    assert seen == vars(knnper)["_MODULES"]


LIGHT = """
import sys, knnper
heavy = {"torch", "numpy", "pydantic", "sklearn", "flwr", "ray"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_importing_it_loads_nothing_that_is_not_asked_for() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


def test_the_listings_do_what_they_say(
    listings: Callable[[str, str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for listing in listings(PAGE, "python"):
        # Fewer clients and rounds, which changes nothing of what is shown.
        small = "num_rounds=1, partition__num_clients=10, progress=False"
        code = re.sub(r"num_rounds=5", small, listing)
        exec(compile(code, PAGE, "exec"), names)
    found = names["found"]
    assert found.names.shape == found.labels.shape == found.weights.shape == (1, 10)
    assert names["probabilities"].shape == names["logits"].shape
    with knnper.LocalMemory.load("memories/site-a") as memory:
        assert len(memory.store_) == 1000
        assert memory.forget(names=["scan-7"]).tolist() == []
