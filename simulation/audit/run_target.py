"""Attacks on a finished simulation.

Every client has the global model, users of a client's service query its memory, and the
server sees updates.
"""

import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from knnper.client.service.documents import InputPrediction, predictions_of
from knnper.data.examples import ClientData, Examples, LabelledArrays, no_examples
from knnper.datastore.prediction import KnnPredictor, NeighborClassifier
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.rounds import untrained
from knnper.server.run import Conductor
from knnper.server.run_folder import RunFolder
from knnper.server.schedule import RoundSchedule
from knnper.server.selection import Uniform
from knnper.settings import plain
from knnper.simulation.audit.audit import Attack, Target
from knnper.simulation.audit.canaries import private_training_game
from knnper.simulation.audit.figures import AttackResult, Scores, membership_result
from knnper.simulation.audit.membership import (
    LIRA,
    MEMORY_ATTACKS,
    Memory,
    confidence_logits,
    lira_scores,
    memory_results,
    sampled,
)
from knnper.simulation.audit.one_run import ONE_RUN, audit_in_one_run
from knnper.simulation.audit.reconstruction import (
    ANALYTIC,
    GRADIENT_MATCHING,
    ObservedUpdate,
    analytic_inputs,
    reconstruction_result,
)
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.partition.clients import Clients, Partition
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.trained_model import EndedRun, client_predictor, ended_with
from knnper.simulation.virtual_clients import VirtualClients
from knnper.simulation.workbench import Workbench, open_workbench, runtime_of
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.mean_update import differences
from knnper.strategies.core.method import UNSEEN_CLIENT

_MOST_QUERIES = 1000  # of stored and of test examples, of all clients together
_NUM_SINGLE = 16  # updates of one example
_MOST_FIRST = 20  # clients with an attack on their first update
_MOST_PARAMETERS = 1_000_000  # of a model, for gradient matching
FIRST, SINGLE = "first update of a client", "update of one example"
MEAN = "mean of the first round"


@dataclass(frozen=True)
class RunTarget(Target):
    """A finished simulation; made by `open_run`.

    ``num_shadows``: models that LiRA trains, at least 2. ``observer``: of their
    training, and of the memories that are attacked.
    """

    ended: EndedRun
    num_shadows: int
    observer: Observer

    @property
    @override
    def attacks(self) -> Mapping[str, Attack]:
        return {
            LIRA: self._lira,
            **dict.fromkeys(MEMORY_ATTACKS, self._memories),
            **dict.fromkeys((ANALYTIC, GRADIENT_MATCHING), self._updates),
            ONE_RUN: self._one_run,
        }

    @property
    def bench(self) -> Workbench:
        """The experiment with its clients."""
        return self.ended.bench

    @functools.cached_property
    def trainable(self) -> list[str]:
        """The clients that take part in training, sorted."""
        return sorted(self.bench.roster.trainable())

    # The global model

    def _lira(self, _: Sequence[str], key: RandomKey) -> Iterator[AttackResult]:
        """Attack the training examples of the seen clients, beside their test examples.

        Each shadow model is trained as the run was, on a random half of all of these.
        The two models of a pair share no example, so each example is missing in one.
        """
        key, dataset = key.child(LIRA), self.bench.clients.dataset
        # All examples in one split: those of the test split follow the others.
        splits, num_train = (dataset.train, dataset.test), len(dataset.train)
        pool = LabelledArrays(
            np.concatenate([split.images for split in splits]),
            np.concatenate([split.labels for split in splits]),
        )
        parts = [self.bench.clients.parts[client] for client in self.trainable]
        places = [np.append(part.train, num_train + part.test) for part in parts]
        # Each once: clients may share test examples, such as those of their domain.
        rows = np.array([*dict.fromkeys(np.concatenate(places).tolist())])
        is_member = rows < num_train
        if is_member.all():
            reason = "no client has test examples to compare with"
            yield AttackResult(LIRA, "global model", left_out=reason)
            return
        examples = pool.examples_at(rows)
        is_out, shadow_logits = [], []
        for number in range(self.num_shadows):
            # Both models of a pair have the same draw.
            rng = key.child("halves", number // 2).numpy()
            is_chosen = (rng.random(len(rows)) < 0.5) ^ bool(number % 2)
            shadow_parts = [
                replace(part, train=place[np.isin(place, rows[is_chosen])])
                for part, place in zip(parts, places, strict=True)
            ]
            partition = Partition(Clients.of(shadow_parts))
            clients = VirtualClients.of(replace(dataset, train=pool), partition)
            bench = replace(self.bench, partition=partition, clients=clients)
            state = self._train(bench, key.child("shadow", number))
            shadow_logits.append(self._logits(state, examples))
            is_out.append(~is_chosen)
        logits = self._logits(self.ended.last.state, examples)
        scores = lira_scores(logits, np.stack(shadow_logits), np.stack(is_out))
        yield membership_result(LIRA, "global model", scores, is_member)

    def _train(self, bench: Workbench, key: RandomKey) -> Any:
        """Train as the run did on other examples; return the server's last state.

        The initial weights are the run's, which every client knows. All other random
        choices differ, such as noise.
        """
        seed = key.entropy(num_bytes=4)
        run = replace(bench.experiment.run, seed=seed, exploding_rounds=0)
        experiment = replace(bench.experiment, run=run)
        bench = replace(bench, experiment=experiment, key=RandomKey(seed))
        with tempfile.TemporaryDirectory(prefix="knnper-audit-") as path:
            folder = RunFolder.create(Path(path), experiment)
            federation = SerialFederation(runtime_of(bench, folder.path))
            conductor = Conductor(bench, federation, folder, self.observer)
            return conductor.train(bench.roster, ()).state

    def _logits(self, state: Any, examples: Examples) -> Scores:
        """Return the `confidence_logits` of the model of a client without data."""
        bench = self.bench
        key = bench.key.child("broadcast", "hand-over", UNSEEN_CLIENT)
        payload = bench.method.broadcast(state, UNSEEN_CLIENT, key)
        runtime = runtime_of(bench, self.ended.folder.path)
        predict = runtime.unpersonalised(payload)
        return confidence_logits(predict(examples.images), examples.labels)

    # The clients' memories

    def _memories(
        self, attacks: Sequence[str], key: RandomKey
    ) -> Iterator[AttackResult]:
        """Attack the memories of all clients, with the same share of each one's data.

        Examples that an eviction policy dropped count as stored.
        """
        bench, key = self.bench, key.child("memories")
        sizes = bench.roster.sizes()
        share = min(1.0, _MOST_QUERIES / sum(sizes.values()))
        outcomes = []
        self.observer.personalization_started(len(sizes))
        for client in sizes:
            memory = self._memory(client)
            self.observer.client_personalized()
            data = bench.clients.data(client).train_and_validation()
            test, rng = bench.clients.test(client), key.child(client)
            if memory is None or len(data) == 0 or len(test) == 0:
                continue
            queries, is_member = sampled(data, test, share, rng.child("queries"))
            outcomes.append((memory.attack(queries, rng), is_member))
        reason = "the clients of the run have no memory"
        yield from memory_results(attacks, "memories", outcomes, reason)

    def _memory(self, client: str) -> Memory | None:
        predictor = client_predictor(self.ended, client)
        if not isinstance(predictor, KnnPredictor):
            return None
        neighbors = predictor.neighbors
        if not isinstance(neighbors, NeighborClassifier):
            return None

        def ask(inputs: Tensor) -> list[InputPrediction]:
            names = self.bench.dataset.class_names
            return predictions_of(predictor.explain(inputs), names).predictions

        return Memory(
            ask,
            predictor.embed,
            predictor.head,
            predictor.effective_knn_weight,
            neighbors.num_neighbors,
            neighbors.kernel,
            neighbors.kernel_scale,
            neighbors.num_stored,
        )

    # Updates, as the server sees them

    def _updates(
        self, attacks: Sequence[str], key: RandomKey
    ) -> Iterator[AttackResult]:
        key = key.child("updates")
        task, surfaces = self.bench.task, self.observed(key.child("single"))
        # If a head alone is trained, clients hold embeddings.
        noun = "inputs" if task.spec == self.bench.whole.spec else "embeddings"
        for attack in attacks:
            if reason := self._obstacle(attack, surfaces):
                yield AttackResult(attack, "updates", left_out=reason)
                continue
            for surface in surfaces if attack == ANALYTIC else (SINGLE,):
                updates = surfaces[surface]
                yield reconstruction_result(attack, surface, task, updates, noun, key)

    def _obstacle(
        self, attack: str, surfaces: Mapping[str, Sequence[ObservedUpdate]]
    ) -> str:
        """Return why an attack is impossible; empty if it is possible."""
        task, parameters = self.bench.task, self.bench.task.model.num_parameters
        update = next(iter(surfaces.values()))[0]
        shapes = {update.weights.shape, update.decrease.shape}
        if shapes != {(task.model.num_weights,)}:
            return "an update is no vector of weights"
        if task.spec.dtype not in ("uint8", "float32"):
            return "text has no PSNR"
        if attack == ANALYTIC:
            if len(analytic_inputs(task, update)) == 0:
                return "no linear layer with a bias takes the inputs"
        elif SINGLE not in surfaces:
            return "the server sees no single update"
        elif parameters > _MOST_PARAMETERS:
            return f"the model has {parameters} parameters"
        return ""

    def observed(self, key: RandomKey) -> Mapping[str, Sequence[ObservedUpdate]]:
        """Return updates as the server sees them, by surface.

        With secure aggregation it sees means alone. The updates of one example are
        those of clients without other data.
        """
        training, clients = self.bench.experiment.training, self.bench.clients
        names = self.trainable
        if training.secure_aggregation is not None:
            selection = Uniform(self.bench.key)
            schedule = RoundSchedule(names, training.participation, selection)
            return {MEAN: [self._mean_update([*schedule.cohort(1).versions])]}
        firsts = [self.update(name, clients.data(name)) for name in names[:_MOST_FIRST]]
        singles, rng = [], key.numpy()
        nothing = no_examples(self.bench.task.spec)
        for _ in range(_NUM_SINGLE):
            client = names[rng.integers(len(names))]
            train = clients.data(client).train
            example = train.take(torch.tensor([rng.integers(len(train))]))
            singles.append(self.update(client, ClientData(example, nothing)))
        return {FIRST: firsts, SINGLE: singles}

    def _mean_update(self, senders: Sequence[str]) -> ObservedUpdate:
        """Return the mean of updates in round 1, to quantisation.

        Its examples are those of the first senders.
        """
        is_private = self.bench.experiment.privacy is not None
        examples, mean = no_examples(self.bench.task.spec), RunningMean()
        for place, client in enumerate(senders):
            update = self.update(client, self.bench.clients.data(client))
            # With privacy all clients count alike.
            mean.add(update.decrease, 1 if is_private else len(update.examples))
            if place < _MOST_FIRST:
                examples = examples.join(update.examples)
        return ObservedUpdate(update.weights, mean.result(), examples)

    def update(self, client: str, data: ClientData) -> ObservedUpdate:
        """Return a client's update in round 1; on its own data with the run's bits.

        It has other shapes if the method's updates are no models.
        """
        bench, method = self.bench, self.bench.method
        key = bench.key.child("broadcast", 1, client)
        payload = method.broadcast(untrained(bench, bench.roster).state, client, key)
        key = bench.key.child("client_update", 1, client)
        _, sent = method.client_update(payload, None, data, 1, key)
        update = sent if method.decoded is None else method.decoded(payload, sent)
        decrease = -differences(method, payload, update)
        weights = getattr(payload, "weights", torch.empty(0))
        return ObservedUpdate(weights, decrease, data.train)

    def _one_run(self, _: Sequence[str], key: RandomKey) -> Iterator[AttackResult]:
        game = private_training_game(self.bench, self.ended.last.server_round)
        if game is None:
            reason = "the run claims no privacy, or its updates are no models"
            yield AttackResult(ONE_RUN, "private training", left_out=reason)
        else:
            yield audit_in_one_run(game, key.child(ONE_RUN))


def open_run(
    path: Path, num_shadows: int, observer: Observer | None = None
) -> RunTarget:
    """Open a finished simulation. Raises RunError if its data or last state changed."""
    folder = RunFolder.open(path)
    experiment = folder.experiment(experiment_catalogue())
    folder.results()  # raises for a run that is not done
    bench = open_workbench(experiment)
    if not bench.roster.trainable() or not bench.method.num_rounds:
        raise RunError(f"the run in {path} trained no model, expected one to audit")
    ended = ended_with(folder, experiment, bench)
    facts = {
        "address": str(path),
        "experiment": plain(experiment),
        "rounds": ended.last.server_round,
        "last_state": ended.last.fingerprint,
        "shadow_models": num_shadows,
    }
    return RunTarget(facts, ended, num_shadows, observer or Observer())
