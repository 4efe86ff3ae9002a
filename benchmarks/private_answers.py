"""Accuracy of private answers against ε, for 2,000 queries to a site's memory.

A linear head on a frozen MobileNetV2 is trained on 3,000 images of all classes. A site
with unequal classes stores 2,500 other images, and gets 2,000 more as queries. τ, σ₂
and λ are those with the best accuracy on 1,000 images that are not stored either, each
a query twice. λ of kNN-Per is chosen on these, too.
"""

import argparse
import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.measurement import Measurement, make_parser, say
from knnper.data.image_folders import ImageFolderSettings
from knnper.datastore.memory import PAPER_KNN_WEIGHTS
from knnper.datastore.prediction import NeighborClassifier, interpolate
from knnper.datastore.private_answers import (
    NoisyVotes,
    PrivateAnswerSettings,
    mixed_probabilities,
    noisy_votes,
    normalised,
)
from knnper.datastore.store import memory_store
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.reports.estimate import estimate
from knnper.strategies.core.assembly import assemble

NUM_CLASSES = 10
# Images that are embedded, of the training and the test split.
NUM_TRAIN, NUM_TEST = 16_000, 7_000
NUM_HEAD, NUM_STORED, NUM_VALIDATION, NUM_QUERIES = 3_000, 2_500, 1_000, 2_000
# A site's classes: shares from a Dirichlet distribution, none above the largest.
ALPHA, LARGEST_SHARE = 0.3, 0.35
EPSILONS = (1.0, 2.0, 4.0, 8.0)
# τ: quantiles of the cosines between validation images and stored images.
QUANTILES = (0.85, 0.9, 0.95, 0.98)
VOTE_NOISES = (0.35, 0.5, 0.8, 1.2)
KNN_WEIGHTS = (0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Embedded:
    """n images: embeddings (n, p), labels (n,) and p_global (n, c) once known."""

    embeddings: Tensor
    labels: Tensor
    probabilities: Tensor | None = None

    def take(self, rows: NDArray[np.int64]) -> "Embedded":
        """Return the images at positions ``rows``."""
        places = torch.from_numpy(rows)
        return Embedded(self.embeddings[places], self.labels[places])

    def accuracy(self, probabilities: Tensor) -> float:
        """Return the fraction of images with the most probable class as label."""
        return float((probabilities.argmax(dim=1) == self.labels).double().mean())

    def p_global(self) -> Tensor:
        """Return the global model's probabilities."""
        assert self.probabilities is not None
        return self.probabilities


@dataclass(frozen=True)
class Site:
    """A site's images, with the probabilities of the global head."""

    stored: Embedded
    validation: Embedded
    queries: Embedded


def embedded_images(images: str, weights: Path) -> tuple[Embedded, Embedded]:
    """Embed random images of both splits by a frozen MobileNetV2 at 96x96 pixels."""
    data = ImageFolderSettings(root=images).load()
    document = {
        "name": "benchmark",
        "data": {"name": "image_folder", "root": images},
        "partition": {"name": "iid", "num_clients": 1},
        "model": {
            "name": "torchvision",
            "architecture": "mobilenet_v2",
            "weights": str(weights.absolute()),
            "image_size": 96,
            "trained": "head",
        },
        "method": {"name": "fedavg"},
        "run": {"engine": "serial"},
    }
    experiment = load_experiment(document, experiment_catalogue())
    task = assemble(experiment, data.spec).task
    rng = RandomKey(0, ("private answers",)).numpy()
    splits = []
    for arrays, count in ((data.train, NUM_TRAIN), (data.test, NUM_TEST)):
        rows = np.sort(rng.permutation(len(arrays.labels))[:count])
        say(f"private_answers: embedding {count} images")
        pixels = torch.from_numpy(np.asarray(arrays.images)[rows])
        embeddings = task.embed(task.initial_weights, pixels)
        labels = torch.from_numpy(np.asarray(arrays.labels)[rows].astype(np.int64))
        splits.append(Embedded(embeddings, labels))
    return splits[0], splits[1]


def site_of(train: Embedded, test: Embedded, seed: int) -> Site:
    """Draw a site and the images of the head, and train the head."""
    rng = RandomKey(seed, ("site",)).numpy()
    shares = rng.dirichlet([ALPHA] * NUM_CLASSES)
    while shares.max() > LARGEST_SHARE:
        shares = rng.dirichlet([ALPHA] * NUM_CLASSES)
    order = rng.permutation(len(train.labels))
    head = trained_head(train.take(order[:NUM_HEAD]), rng)
    rest = order[NUM_HEAD:]
    rows = images_by_class(train, rest, NUM_STORED + NUM_VALIDATION, shares)
    rows = rng.permutation(rows)
    queries = images_by_class(
        test, rng.permutation(len(test.labels)), NUM_QUERIES, shares
    )
    parts = (
        train.take(rows[:NUM_STORED]),
        train.take(rows[NUM_STORED:]),
        test.take(rng.permutation(queries)),
    )
    with torch.inference_mode():
        return Site(
            *(
                dataclasses.replace(
                    part, probabilities=head(part.embeddings).softmax(dim=1)
                )
                for part in parts
            )
        )


def images_by_class(
    images: Embedded, order: NDArray[np.int64], count: int, shares: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the first positions in ``order`` of each class, by its share."""
    counts = np.round(shares * count).astype(int)
    counts[counts.argmax()] += count - counts.sum()
    labels = images.labels.numpy()[order]
    rows = [order[labels == label][:size] for label, size in enumerate(counts)]
    chosen = np.concatenate(rows)
    assert len(chosen) == count, "LARGEST_SHARE allows for the images of a class"
    return chosen


def trained_head(examples: Embedded, rng: np.random.Generator) -> torch.nn.Linear:
    """Train a linear head by SGD from zeros, 20 epochs."""
    head = torch.nn.Linear(examples.embeddings.shape[1], NUM_CLASSES)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.03, momentum=0.9)
    for _ in range(20):
        order = rng.permutation(len(examples.labels))
        for start in range(0, len(order), 128):
            batch = examples.take(order[start : start + 128])
            optimizer.zero_grad()
            logits = head(batch.embeddings)
            loss = torch.nn.functional.cross_entropy(logits, batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return head


def knn_per_accuracy(site: Site) -> float:
    """Return the accuracy of kNN-Per on the queries; λ is chosen on validation data."""
    with memory_store(site.stored.embeddings, site.stored.labels, NUM_CLASSES) as store:
        vote = NeighborClassifier(store, 10, "paper", 1.0)

        def accuracy(images: Embedded, weight: float) -> float:
            mixed = interpolate(vote(images.embeddings), images.p_global(), weight)
            return images.accuracy(mixed)

        weight = max(
            PAPER_KNN_WEIGHTS, key=lambda weight: accuracy(site.validation, weight)
        )
        return accuracy(site.queries, weight)


def private_accuracy(site: Site, epsilon: float, seed: int) -> tuple[float, float]:
    """Return the accuracy on the queries, and the share of examples still voting."""
    twice = np.tile(np.arange(NUM_VALIDATION), NUM_QUERIES // NUM_VALIDATION)
    validation = dataclasses.replace(
        site.validation.take(twice), probabilities=site.validation.p_global()[twice]
    )
    cosines = cosines_of(site, site.validation)
    choices = []
    for quantile, vote_noise in itertools.product(QUANTILES, VOTE_NOISES):
        settings = PrivateAnswerSettings(
            epsilon=epsilon,
            threshold=float(np.quantile(cosines, quantile)),
            vote_noise=vote_noise,
            num_queries=NUM_QUERIES,
        )
        votes = votes_on(site, validation, settings, seed)
        for weight in KNN_WEIGHTS:
            accuracy = mixed_accuracy(validation, votes, weight)
            choices.append((accuracy, weight, settings))
    _, weight, settings = max(choices, key=lambda choice: choice[0])
    votes = votes_on(site, site.queries, settings, seed)
    still_voting = float(settings.can_vote(votes.spent).mean())
    return mixed_accuracy(site.queries, votes, weight), still_voting


def cosines_of(site: Site, images: Embedded) -> NDArray[np.float32]:
    """Return the cosines of images with the stored images, (n, N)."""
    unit = normalised(images.embeddings.numpy())
    cosines: NDArray[np.float32] = unit @ normalised(site.stored.embeddings.numpy()).T
    return cosines


def votes_on(
    site: Site, images: Embedded, settings: PrivateAnswerSettings, seed: int
) -> NoisyVotes:
    """Ask a new memory for all images, in order."""
    labels = site.stored.labels.numpy()
    rng = RandomKey(seed, ("noise",)).numpy()
    cosines = cosines_of(site, images)
    return noisy_votes(
        cosines, labels, np.zeros(len(labels)), NUM_CLASSES, settings, rng
    )


def mixed_accuracy(images: Embedded, votes: NoisyVotes, knn_weight: float) -> float:
    """Return the accuracy of the private mixture."""
    mixed = mixed_probabilities(votes, images.p_global().numpy(), knn_weight)
    return images.accuracy(torch.from_numpy(mixed))


def measure(repetitions: int, images: str, weights: Path) -> list[Measurement]:
    """Measure the accuracies of the global model, kNN-Per and private answers."""
    train, test = embedded_images(images, weights)
    global_model: list[float] = []
    knn_per: list[float] = []
    private: dict[float, list[tuple[float, float]]] = {e: [] for e in EPSILONS}
    for seed in range(repetitions):
        say(f"private_answers: repetition {seed + 1} of {repetitions}")
        site = site_of(train, test, seed)
        global_model.append(site.queries.accuracy(site.queries.p_global()))
        knn_per.append(knn_per_accuracy(site))
        for epsilon, results in private.items():
            results.append(private_accuracy(site, epsilon, seed))
    figures: dict[str, tuple[list[float], dict[str, object]]] = {
        "global model": (global_model, {}),
        "kNN-Per": (knn_per, {}),
    }
    for epsilon, results in private.items():
        voting = estimate([share for _, share in results]).text()
        accuracies = [accuracy for accuracy, _ in results]
        figures[f"epsilon {epsilon:g}"] = (accuracies, {"still_voting": voting})
    return [
        Measurement(
            "private_answers",
            values,
            global_model,
            "accuracy of the global model",
            {"of": name, "mean": estimate(values).text(), **gain(values, global_model)}
            | details,
        )
        for name, (values, details) in figures.items()
    ]


def gain(values: list[float], global_model: list[float]) -> dict[str, object]:
    """Return the paired difference from the global model, with its interval."""
    pairs = zip(values, global_model, strict=True)
    return {"gain": estimate([value - alone for value, alone in pairs]).text()}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument(
        "--weights",
        type=Path,
        default=Path("data/mobilenet_v2.safetensors"),
        help="file of a pretrained MobileNetV2 (default: %(default)s)",
    )
    return parser


def main() -> None:
    """Measure and print; do nothing without images or weights."""
    options = parser().parse_args()
    if not options.images or not options.weights.is_file():
        file = "a" if options.weights.is_file() else "no"
        say(
            "private_answers: skipped. Found images in "
            f"{options.images or 'no folder'} and {file} file {options.weights}, "
            "expected both: make bench-private_answers IMAGES=ROOT "
            "ARGS='--weights FILE'"
        )
        return
    for figure in measure(options.repetitions, options.images, options.weights):
        print(figure.as_json(), flush=True)


if __name__ == "__main__":
    main()
