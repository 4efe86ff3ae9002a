"""The comparisons of the paper's Table 2 have every method."""

from pathlib import Path

import pytest

from knnper.simulation.batches.plan import read_comparison
from knnper.strategies.catalogue import METHODS

FILES = [
    Path("simulation/experiments") / f"table2_{data}.yaml"
    for data in ("cifar10", "digits")
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_compares_the_methods(path: Path) -> None:
    comparison = read_comparison(path)
    runs = [points[0].tuning for points in comparison.variants.values()]
    methods = {
        run.method.name
        for run in runs
        if run is not None
        and (
            run.personalization.name == "none"
            or METHODS[run.method.name].personalization != "none"
        )
    }
    assert len(methods) >= 35  # a new method may be given a row, and need not
    assert len(comparison.seeds) == (3 if "digits" in path.stem else 1)
