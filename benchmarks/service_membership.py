"""AUC of membership inference from a service's answers, by a token's scope.

A global model is trained on some digits. A site that took no part stores other digits
and chooses λ, k and σ. An attacker with the global model and the right label of each
input queries the stored digits and the same number of other digits of the same classes.
An AUC of 0.5 is chance, 1.0 is certainty. With `predict`, the attacker uses the
correctness of the class; with `probabilities`, the neighbours' contribution to the
label's probability; with `neighbors`, the smallest distance.
"""

import argparse
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measurement import Measurement, make_parser, say
from knnper.client.served_model import ServedModel, open_served
from knnper.client.service.access import EVERYBODY
from knnper.client.service.documents import (
    InputPrediction,
    Predictions,
    as_json,
    predictions_of,
)
from knnper.client.service.tokens import Caller, Scope
from knnper.client.site_state import SiteState
from knnper.data.digits import CLASS_NAMES, digit_images
from knnper.data.examples import Examples, InputSpec, no_examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.data.site_task import SiteTask
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.audit.figures import area_under_curve
from knnper.simulation.audit.membership import Memory
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.assembly import assemble
from knnper.strategies.core.exported_model import GlobalModel, global_model
from knnper.strategies.core.training import local_sgd

NUM_TRAIN, NUM_STORED, NUM_VALIDATION = 300, 400, 200
SITE = SiteTask(InputSpec((8, 8, 1), 10, (0.3,), (0.38,)), CLASS_NAMES)
PREDICT = Caller("attacker", frozenset[Scope](("predict",)))
PROBABILITIES = Caller("attacker", frozenset[Scope](("predict", "probabilities")))
# The caller and the attack of each scope.
SCOPES: dict[str, tuple[Caller, str]] = {
    "predict": (PREDICT, "labels"),
    "probabilities": (PROBABILITIES, "probabilities"),
    "neighbors": (EVERYBODY, "neighbors"),
}


def measure(repetitions: int, digits: int | None, noise: float) -> list[Measurement]:
    """Measure the AUC of each scope; probabilities are rounded to ``digits`` digits."""
    values: dict[str, list[float]] = {scope: [] for scope in SCOPES}
    for seed in range(repetitions):
        say(f"service_membership: repetition {seed + 1} of {repetitions}")
        for scope, value in aucs(seed, digits, noise).items():
            values[scope].append(value)
    coin = [0.5] * repetitions
    return [
        Measurement(
            "service_membership",
            auc,
            coin,
            "AUC of a coin",
            {"scope": scope, "stored": NUM_STORED, "digits": digits, "noise": noise},
        )
        for scope, auc in values.items()
    ]


def aucs(seed: int, digits: int | None, noise: float) -> dict[str, float]:
    """Compute the AUC of each scope."""
    key = RandomKey(seed, ("membership",))
    public, stored, others, validation = drawn(key, noise)
    model = trained(public, key)
    queries = stored.join(others)
    is_stored = np.arange(len(queries)) < len(stored)
    with tempfile.TemporaryDirectory(prefix="knnper-membership-") as folder:
        site_state = SiteState(Path(folder), "site")
        site_data = SiteData(
            named(stored, "stored"),
            named(validation, "validation"),
            named(no_examples(SITE.spec), "none"),
            SITE,
        )
        site_state.install(model, site_data, took_part=False)
        with closing(open_served(site_state)) as served:
            return {
                scope: area_under_curve(scores[is_stored], scores[~is_stored]).value
                for scope, (caller, attack) in SCOPES.items()
                for scores in [
                    memory_of(served, caller, digits).attack(queries, key)[attack]
                ]
            }


def drawn(key: RandomKey, noise: float) -> list[Examples]:
    """Return digits in four sets, with ``noise`` on their pixels."""
    images, labels = digit_images()
    rng = key.numpy()
    start = 0
    parts = []
    noisy = np.clip(images + rng.normal(0, noise, images.shape), 0, 255)
    order = torch.from_numpy(rng.permutation(len(labels)))
    all_of_them = Examples(
        torch.from_numpy(noisy.astype(np.uint8)), torch.from_numpy(labels)
    )
    for size in (NUM_TRAIN, NUM_STORED, NUM_STORED, NUM_VALIDATION):
        parts.append(all_of_them.take(order[start : start + size]))
        start += size
    return parts


def memory_of(served: ServedModel, caller: Caller, digits: int | None) -> Memory:
    """Return the memory as a caller meets it."""

    def ask(inputs: Tensor) -> list[InputPrediction]:
        names = served.model.class_names
        document = as_json(caller, predictions_of(served.predict(inputs), names))
        answers = Predictions.model_validate_json(document).predictions
        for answer in answers:
            if answer.probabilities is not None and digits is not None:
                shown = answer.probabilities.items()
                answer.probabilities = {name: round(p, digits) for name, p in shown}
        return answers

    model, serving = served.model, served.serving
    return Memory(
        ask,
        model.embed,
        model.head,
        serving.knn_weight,
        serving.num_neighbors,
        serving.kernel,
        serving.kernel_scale,
        len(served.store),
    )


def trained(examples: Examples, key: RandomKey) -> GlobalModel:
    """Train a model on examples for some epochs."""
    document = {
        "name": "benchmark",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 1},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "knn_per"},
        "training": {"local_epochs": 20, "batch_size": 32},
        "run": {"engine": "serial"},
    }
    experiment = load_experiment(document, experiment_catalogue())
    task = assemble(experiment, SITE.spec).task
    weights = local_sgd(task, task.initial_weights, examples, 0.05, key).weights
    return global_model(experiment, task, SITE, weights)


def named(examples: Examples, kind: str) -> NamedExamples:
    """Name examples by a prefix and their positions."""
    names = tuple(f"{kind}/{number:05d}" for number in range(len(examples)))
    return NamedExamples(examples, names)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument("--digits", type=int, help="to which probabilities are rounded")
    parser.add_argument(
        "--noise", type=float, default=80.0, help="deviation, of pixels of 0 to 255"
    )
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    for figure in measure(options.repetitions, options.digits, options.noise):
        print(figure.as_json(), flush=True)


if __name__ == "__main__":
    main()
