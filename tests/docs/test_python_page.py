"""The public Python interface: what it holds, what it costs, and its page."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import knnper
from knnper import strategies

PAGE = "docs/python.md"
PUBLIC = [
    *("Assignment", "ClientData", "ConfigError", "DataError", "DataFormat", "Dataset"),
    *("EmbeddingModel", "Examples", "Experiment", "FedAvg", "InputSpec", "KnnPerError"),
    *("LabelledArrays", "LocalMemory", "Method", "NeighborTable", "NonNegativeFloat"),
    *("NonNegativeInt", "OwnCodeError", "Personalizer", "Policy", "PositiveFloat"),
    *("PositiveFraction", "PositiveInt", "Problem", "ProperFraction", "RandomKey"),
    *("Run", "RunError", "Settings", "StoreError", "UnitInterval", "simulate"),
]
OF_METHODS = [
    *("Compressor", "FedAvg", "HeadPredictor", "LocalModel", "LocalResult", "Method"),
    *("MixturePredictor", "ModelPayload", "ModelPredictor", "ModelState"),
    *("ModelUpdate", "NoSettings", "NoState", "PartlyShared", "Personalizer"),
    *("Predictor", "Record", "RunningMean", "Task", "Updates", "evaluate"),
    *("local_sgd", "mean_in_parts", "num_steps", "on_both_splits", "pull"),
    "trained_on_both_splits",
]


def test_public_names_are_documented(
    tables: Callable[[str], dict[tuple[str, str], dict[str, list[str]]]],
) -> None:
    # Who takes one away, or renames it, breaks what users have written.
    assert knnper.__all__ == PUBLIC
    assert {*PUBLIC} <= {*dir(knnper)}
    rows = tables(PAGE)["What is public", ""]
    assert {name.strip("`") for row in rows for name in row.split(", ")} == {*PUBLIC}
    for name in PUBLIC:
        assert inspect.getdoc(getattr(knnper, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = knnper.simulat  # type: ignore[attr-defined]


def test_names_for_methods_are_documented() -> None:
    assert strategies.__all__ == OF_METHODS
    assert {*OF_METHODS} <= {*dir(strategies)}
    page = Path("docs/adding_a_method.md").read_text(encoding="utf-8")
    table = page.partition("## What to import")[2].partition("\n## ")[0]
    assert {*OF_METHODS} <= {*re.findall(r"`(\w+)`", table)}
    assert all(getattr(strategies, name) is not None for name in OF_METHODS)
    with pytest.raises(AttributeError, match="has no attribute 'local_sdg'"):
        _ = strategies.local_sdg  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", [knnper, strategies])
def test_type_checkers_see_the_lazy_imports(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    seen = {
        name.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("knnper.")
        for name in node.names
        if node.module != "knnper.lazy"
    }
    assert seen == vars(package)["_MODULES"]


PAGES_OF_OWN_CODE = [
    *("docs/own_code.md", "docs/configuration.md", "docs/flower.md"),
    *("docs/tutorials/own_method.md", "docs/tutorials/own_model.md"),
    "docs/tutorials/own_data.md",
]


@pytest.mark.parametrize("page", PAGES_OF_OWN_CODE)
def test_own_code_imports_public_names_only(
    page: str, listings: Callable[[str, str], list[str]]
) -> None:
    public = {"knnper": knnper.__all__, "knnper.strategies": strategies.__all__}
    code = listings(page, "python")
    assert code
    for listing in code:
        for node in ast.walk(ast.parse(listing)):
            if isinstance(node, ast.ImportFrom) and node.module in public:
                assert {alias.name for alias in node.names} <= {*public[node.module]}
            elif isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith("knnper")
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                assert not any(name.startswith("knnper.") for name in names)


LIGHT = """
import sys, knnper
heavy = {"torch", "numpy", "pydantic", "sklearn", "flwr", "ray"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_import_loads_no_heavy_package() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


def test_listings_run(
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
    neighbors = names["neighbors"]
    assert (
        neighbors.names.shape
        == neighbors.labels.shape
        == neighbors.weights.shape
        == (1, 10)
    )
    assert names["probabilities"].shape == names["logits"].shape
    with knnper.LocalMemory.load("memories/site-a") as memory:
        assert len(memory.store_) == 1000
        assert memory.forget(names=["scan-7"]).tolist() == []
