"""Training and measuring on the synthetic mixture, for the three-approaches figure."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from knnper.config.document import results_identity
from knnper.config.loading import load_experiment
from knnper.data.examples import ClientData
from server.checkpoint import CheckpointFolder
from server.conduct import round_loop, untrained
from simulation.catalogue import experiment_catalogue
from simulation.client_runtime import runtime_of
from simulation.figures.folder import PartRecord
from simulation.figures.three_approaches import (
    Candidate,
    Sections,
    ThreeApproachesSettings,
)
from simulation.serial_engine import SerialFederation
from simulation.workbench import Workbench, open_workbench
from strategies.core.evaluation import Evaluation, evaluate
from strategies.core.method import Predictor


class Measurements:
    """Trains and measures on one data set; what was trained once is used again.

    Parameters
    ----------
    settings
        Of the figure.
    num_samples
        m.
    seed
        Of the users' examples, the splits and the training.
    """

    def __init__(
        self, settings: ThreeApproachesSettings, num_samples: int, seed: int
    ) -> None:
        self._base = _base(settings, num_samples, seed)
        self._trained: dict[str, Any] = {}

    def measure(self, candidates: Sequence[Candidate]) -> PartRecord:
        """Return how the candidate does that does best on the validation splits.

        Returns
        -------
        Mapping
            ``validation_loss`` and ``test_loss``, the means of -log p(y) over all
            users' examples, and ``chosen``. Test splits are read for the chosen one
            only.
        """
        scored = []
        for candidate in candidates:
            bench = self._bench(candidate.trained, candidate.served)
            state = self._state(candidate.trained)
            scored.append((_validation_loss(bench, state), bench, state))
        losses = [loss for loss, _, _ in scored]
        best = losses.index(min(losses))
        _, bench, state = scored[best]
        return {
            "validation_loss": losses[best],
            "test_loss": _test_loss(bench, state),
            "chosen": dict(candidates[best].chosen),
        }

    def _bench(self, *changes: Sections) -> Workbench:
        document: dict[str, Any] = dict(self._base)
        for sections in changes:
            for name, section in sections.items():
                kept = name in ("partition", "training", "run")
                document[name] = {**document[name], **section} if kept else section
        return open_workbench(load_experiment(document, experiment_catalogue()))

    def _state(self, trained: Sections) -> Any:
        bench = self._bench(trained)
        identity = results_identity(bench.experiment)
        if identity not in self._trained:
            self._trained[identity] = _train(bench)
        return self._trained[identity]


def _base(
    settings: ThreeApproachesSettings, num_samples: int, seed: int
) -> dict[str, Mapping[str, Any] | str]:
    return {
        "name": "three-approaches",
        "data": {
            "name": "synthetic_mixture",
            "num_users": settings.num_users,
            "num_samples": num_samples,
            "seed": seed,
        },
        "partition": {"name": "natural"},
        "model": {"name": "softmax_regression"},
        "training": {
            "num_rounds": settings.num_rounds,
            "local_steps": 5,
            "learning_rate": 1.0,
        },
        "run": {
            "seed": seed,
            "engine": "serial",
            "checkpoint_every": settings.num_rounds,
        },
    }


def _train(bench: Workbench) -> Any:
    """Return the server's state after all rounds, as a run would have it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = CheckpointFolder(
            folder / "checkpoints", results_identity(bench.experiment)
        )
        federation = SerialFederation(runtime_of(bench, folder))
        loop = round_loop(bench, bench.roster, federation, checkpoints, lambda _: None)
        return loop.train(untrained(bench, bench.roster)).state


def _validation_loss(bench: Workbench, state: Any) -> float:
    """Return the mean loss on validation data that the clients do not use.

    What a client chooses for itself, such as λ, it chooses on a part of its training
    data: on examples that it chose on, a method that chooses more looks better.
    """
    return _mean_loss(
        evaluate(
            _personalized(bench, state, client, without_validation(data)),
            data.validation,
        )
        for client, data in _clients(bench)
    )


def without_validation(data: ClientData) -> ClientData:
    """Return the training split divided as all data is; one example is left alone."""
    examples = data.train
    total = len(examples) + len(data.validation)
    count = round(len(examples) * len(data.validation) / max(total, 1))
    count = max(count, int(len(examples) > 1))
    order = torch.arange(len(examples))
    kept, held_out = order[: len(order) - count], order[len(order) - count :]
    return ClientData(examples.take(kept), examples.take(held_out))


def _test_loss(bench: Workbench, state: Any) -> float:
    return _mean_loss(
        evaluate(_personalized(bench, state, client, data), bench.clients.test(client))
        for client, data in _clients(bench)
    )


def _clients(bench: Workbench) -> Iterator[tuple[str, ClientData]]:
    for client in bench.clients.parts:
        yield client, bench.clients.data(client)


def _personalized(
    bench: Workbench, state: Any, client: str, data: ClientData
) -> Predictor:
    rng = bench.key.child("broadcast", "hand-over", client)
    payload = bench.method.broadcast(state, client, rng)
    rng = bench.key.child("personalize", client)
    return bench.method.personalize(payload, None, data, rng)


def _mean_loss(evaluations: Iterator[Evaluation]) -> float:
    """Return Σ -log p(y) / n over all examples."""
    pairs = [(one.log_loss_sum, one.num_examples) for one in evaluations]
    total, count = map(sum, zip(*pairs, strict=True))
    return float(total / count)
