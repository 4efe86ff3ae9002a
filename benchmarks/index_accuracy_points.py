"""Points of kNN-Per accuracy that each kind of index costs, compared with flat.

The images of a run are split among some large clients (Dirichlet, α = 0.3), each with
a store of its own; k is 10 and λ is chosen on a fifth of a client's training images.
There is a line for each kind: the accuracy on all test images less that with flat, and
the bytes of its indexes as a share of flat's.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.command import make_parser, say
from benchmarks.index_kinds import kinds_to_compare
from benchmarks.measurement import Measurement, rounded
from benchmarks.models import ModelAndData, add_run_option, model_and_data
from knnper.data.examples import LabelledArrays
from knnper.datastore.index import FlatSettings, IndexSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import NeighborClassifier, interpolate
from knnper.datastore.store import Store, memory_store
from knnper.datastore.tuning import PAPER_KNN_WEIGHTS, choose_knn_weight
from knnper.seeding import RandomKey
from knnper.simulation.partition.schemes import DirichletSettings, dirichlet
from papers.memory import Embedded

NUM_NEIGHBORS = 10


@dataclass(frozen=True)
class Client:
    """One client's images, embedded."""

    fitted: Embedded
    held_out: Embedded
    test: Embedded


@dataclass(frozen=True)
class Outcome:
    """What a kind of index comes to over all clients."""

    accuracy: float
    num_bytes: int


def measure(clients: list[Client], kind: IndexSettings, flat: Outcome) -> Measurement:
    """Return the points that a kind costs."""
    say(f"index_accuracy_points: {kind}")
    found = outcome(clients, kind)
    details: dict[str, object] = {
        "kind": asdict(kind),
        "accuracy": rounded(found.accuracy),
        "share_of_bytes": rounded(found.num_bytes / flat.num_bytes),
        "clients": len(clients),
        "examples": sum(len(client.fitted) for client in clients),
    }
    points = 100 * (found.accuracy - flat.accuracy)
    baseline_is = "percent right with flat"
    return Measurement(
        "index_accuracy_points", [points], [100 * flat.accuracy], baseline_is, details
    )


def outcome(clients: list[Client], kind: IndexSettings) -> Outcome:
    """Return accuracy and bytes of all clients with one kind of index."""
    num_right = num_test = num_bytes = 0
    for client in clients:
        store = memory_store(
            client.fitted.embeddings,
            client.fitted.labels,
            client.test.probabilities.shape[1],
            StoreSettings(index=kind),
        )
        num_right += _num_right(client, store)
        num_test += len(client.test)
        num_bytes += store.index.num_bytes
    return Outcome(num_right / num_test, num_bytes)


def _num_right(client: Client, store: Store) -> int:
    classifier = NeighborClassifier(store, NUM_NEIGHBORS, "paper", 1.0)
    held_out, test = client.held_out, client.test
    knn_weight = choose_knn_weight(
        classifier(held_out.embeddings),
        held_out.probabilities,
        held_out.labels,
        PAPER_KNN_WEIGHTS,
    )
    mixed = interpolate(classifier(test.embeddings), test.probabilities, knn_weight)
    return int((mixed.argmax(dim=1) == test.labels).sum())


def split(train: Embedded, test: Embedded, num_clients: int) -> Iterator[Client]:
    """Yield clients; none that lacks images to store, to choose λ by or to test."""
    key = RandomKey(0, ("index_accuracy_points",))
    settings = DirichletSettings(num_clients=num_clients, alpha=0.3)
    found = dirichlet(train.labels.numpy(), test.labels.numpy(), settings, key)
    for number in range(num_clients):
        order = key.child(number).numpy().permutation(found.train[number])
        num_held_out = len(order) // 5
        client = Client(
            _take(train, order[num_held_out:]),
            _take(train, order[:num_held_out]),
            _take(test, found.test[number]),
        )
        if num_held_out and len(client.test):
            yield client


def _take(embedded: Embedded, positions: np.ndarray) -> Embedded:
    at = torch.from_numpy(positions)
    return Embedded(
        embedded.embeddings[at], embedded.probabilities[at], embedded.labels[at]
    )


def embed(model: ModelAndData, split: LabelledArrays) -> Embedded:
    """Return a split as the global model sees it."""
    say("index_accuracy_points: embedding")
    embeddings = model.embed(torch.from_numpy(np.array(split.images)))
    labels = torch.from_numpy(np.array(split.labels))
    return Embedded(embeddings, model.head(embeddings), labels)


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=1)
    add_run_option(parser)
    parser.add_argument("--clients", type=int, default=20)
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    torch.set_num_threads(1)
    model = model_and_data(given.run, given.images)
    train, test = (embed(model, s) for s in (model.dataset.train, model.dataset.test))
    clients = list(split(train, test, given.clients))
    flat = outcome(clients, FlatSettings())
    for kind in kinds_to_compare():
        print(measure(clients, kind, flat).as_json(), flush=True)


if __name__ == "__main__":
    main()
