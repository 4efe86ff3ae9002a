"""Protocol files on digits, small enough for seconds."""

from pathlib import Path
from typing import Any

from knnper.loading import dump_yaml

BASE: dict[str, Any] = {
    "name": "base",
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": 6,
        "alpha": 0.3,
        "unseen_fraction": 0.34,
    },
    "model": {"name": "tiny_cnn", "embedding_dim": 4},
    "training": {"num_rounds": 2, "batch_size": 32},
    "method": {"name": "knn_per"},
    "run": {"engine": "serial"},
}
FIGURE: dict[str, Any] = {
    "name": "weak-and-strong",
    "figure": "memory",
    "base": BASE,
    "options": {"only": ["hardware"], "clients": 3, "deals": 1},
}
SWEEP: dict[str, Any] = {
    "name": "neighbors",
    "base": BASE,
    "vary": {"personalization.num_neighbors": [1, 5]},
    "seeds": [1, 2],
    "x": "personalization.num_neighbors",
}
COMPARISON: dict[str, Any] = {
    "name": "methods",
    "reference": "mean",
    "seeds": [1],
    "base": {
        "data": BASE["data"],
        "partition": BASE["partition"],
        "model": BASE["model"],
        "training": {"num_rounds": 1, "batch_size": 64},
    },
    "rows": {
        "mean": {"method": {"name": "fedavg"}},
        "memory": {"method": {"name": "knn_per"}},
    },
}
ABOUT = "# The paper's figure, <small>.\n#\n#   knnper reproduce it.yaml\n"


def write(folder: Path, document: dict[str, Any], **changes: Any) -> Path:
    """Return a file of its name's with a document, a comment at its top."""
    both = {**document, **changes}
    path = folder / f"{both['name']}.yaml"
    path.write_text(ABOUT + dump_yaml(both))
    return path


def without_data(folder: Path) -> Path:
    """Return the file of a sweep over images that are nowhere."""
    data = {"name": "image_folder", "root": str(folder / "nowhere")}
    return write(folder, SWEEP, name="lost", base={**BASE, "data": data})
