"""A comparison of three methods on digits, small enough for seconds."""

from pathlib import Path
from typing import Any

from knnper.simulation.batches.comparison import (
    Comparison,
    read_comparison,
)
from knnper.yaml_text import dump_yaml

ROWS: dict[str, Any] = {
    "mean": {"method": {"name": "fedavg"}},
    "memory": {"method": {"name": "knn_per"}},
    "drift": {
        "method": {"name": "scaffold"},
        "personalization": {"name": "knn"},
        "grid": {"training.learning_rate": []},
    },
}


def plan(tmp_path: Path, *overrides: str, **changes: Any) -> Comparison:
    document = {
        "name": "small",
        "reference": "mean",
        "seeds": [1, 2],
        "base": {
            "data": {"name": "digits"},
            "partition": {
                "name": "dirichlet",
                "num_clients": 5,
                "alpha": 0.3,
                "unseen_fraction": 0.2,
                "used_fraction": 0.3,
            },
            "model": {"name": "tiny_cnn", "embedding_dim": 4},
            "training": {"num_rounds": 2, "batch_size": 16},
        },
        "grid": {"training.learning_rate": [0.0001, 0.1]},
        "rows": ROWS,
        **changes,
    }
    path = tmp_path / "small.yaml"
    path.write_text(dump_yaml(document))
    return read_comparison(path, overrides)
