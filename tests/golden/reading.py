"""Open what `tests.golden.writing` wrote, and return what is in it as plain values."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict
from torch import Tensor
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.client.served_model import open_served
from knnper.client.site_state import SiteState
from knnper.datastore.store import open_store
from knnper.simulation.trained_model import find_model
from knnper.strategies.core.records import ModelUpdate
from knnper.transport.messages import job_of, packed_of, unpack
from tests.client.service.small_service import asking, small_served
from tests.client.state.small_site import NAME, queries
from tests.datastore.small_store import examples

Found = Mapping[str, Any]


def command(*words: object) -> str:
    """Return what ``knnper`` writes to standard output."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def digits() -> Tensor:
    """Return four stated images of 8x8 pixels."""
    pixels = torch.arange(4 * 64).reshape(4, 8, 8, 1)
    return (pixels * 37 % 251).to(torch.uint8)


def read_store(folder: Path) -> Found:
    """Check a store, search it, and add more than it has room for."""
    command("store", "verify", folder / "store")
    with open_store(folder / "store", fingerprint="model", writable=True) as store:
        held = store.contents()
        near = store.search(torch.eye(6)[:4], 5)
        found = {
            "ids": held.ids.tolist(),
            "labels": held.labels.tolist(),
            "names": store.external_ids(held.ids),
            "first_input": store.inputs(held.ids[:1])[0].tolist(),
            "first_vector": store.vectors(held.ids[:1])[0].tolist(),
            "neighbor_ids": near.ids.tolist(),
            "neighbor_labels": near.labels.tolist(),
            "neighbor_distances": near.squared_distances.tolist(),
        }
        store.add(examples(3, seed=1))
        return {**found, "ids_after_adding": store.contents().ids.tolist()}


def read_run(folder: Path) -> Found:
    """Report a finished run, and use the model that it trained."""
    command("report", folder / "run", "--markdown")
    rows = json.loads(command("report", folder / "run", "--json"))
    shown = ("label", "group", "average", "mean", "bottom_decile", "worst")
    model = find_model(folder / "run")
    return {
        "reported": [{key: row[key] for key in shown} for row in rows],
        "probabilities": model.head(model.embed(digits())).tolist(),
    }


def _resumed(run: Path) -> Found:
    """Make rounds 2 and 3 once more from the checkpoint of the first."""
    results = json.loads(
        command("simulate", "--resume", run, "--from-round", 1, "--json")
    )
    return {
        "train_loss": results["training"]["train_loss"],
        **{
            f"{group}_{figure}": results[group][figure]
            for group in ("seen", "unseen")
            for figure in ("num_clients", "accuracy_weighted", "log_loss")
        },
    }


def resume_run(folder: Path) -> Found:
    """Resume a run whose clients keep nothing between rounds."""
    return _resumed(folder / "run")


def sweep_over_run(folder: Path) -> Found:
    """Put other memories on the model of a finished run."""
    run, out = folder / "run", folder / "sweep"
    sweep = {
        "name": "golden",
        "experiment": str(run / "experiment.yaml"),
        "grid": {"personalization.num_neighbors": [3, 10]},
        "seeds": [5],
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep))
    words = ("sweep", file, "--trained", run, "--output", out, "--json")
    points = json.loads(command(*words))
    # With the seconds that each round took: made anew they are others.
    earlier = (run / "rounds.jsonl").read_text()
    return {
        "accuracies": [
            point["estimates"]["seen.accuracy_weighted"]["mean"] for point in points
        ],
        "trained_anew": [
            path.read_text() != earlier for path in out.rglob("rounds.jsonl")
        ],
    }


def read_model(folder: Path) -> Found:
    """Use an exported model."""
    model = find_model(folder / "model")
    embeddings = model.embed(digits())
    return {
        "fingerprint": model.fingerprint,
        "class_names": list(model.class_names),
        "embeddings": embeddings.tolist(),
        "probabilities": model.head(embeddings).tolist(),
    }


def read_site(folder: Path) -> Found:
    """Predict with what a site serves, and give it an example to remember."""
    site_state = SiteState(folder / "site", NAME)
    with open_served(site_state) as served:
        found = served.predict(queries(4))
        served.add(queries(1), torch.tensor([2]), ["one more"])
        return {
            "fingerprint": served.model.fingerprint,
            "class_names": list(served.model.class_names),
            "knn_weight": served.serving.knn_weight,
            "probabilities": found.probabilities.tolist(),
            "neighbor_names": [list(names) for names in found.vote.neighbors.names],
            "num_stored": len(served.store),
        }


def read_message(folder: Path) -> Found:
    """Decode a job and an update."""
    proto = RecordDict.FromString((folder / "message.bin").read_bytes())
    content = recorddict_from_proto(proto)
    job, packed = job_of(content), packed_of(content, "update")
    assert packed is not None
    update = unpack(ModelUpdate, packed)
    return {
        "job": [job.clients, job.server_round, job.keep_rounds, job.experiment],
        "more": [job.session, job.timeout_s, job.model, job.seen, job.state_rounds],
        "weights": update.weights.tolist(),
        "num_examples": update.num_examples,
        "train_loss": update.train_loss,
    }


def described_service(place: Path) -> Any:
    """Return what the service of a tiny model says that it does."""
    with asking(small_served(place / "served")) as client:
        return client.get("/openapi.json").json()


PARTS: Mapping[str, Callable[[Path], Found]] = MappingProxyType(
    {
        "store": read_store,
        "run": read_run,
        "resume": resume_run,
        "sweep": sweep_over_run,
        "model": read_model,
        "site": read_site,
        "message": read_message,
    }
)
