"""How the accuracy follows a shift under each policy of the store.

knn-per.txt, Appendix B, "Robustness to distribution shift", Figure 14.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from datastore.examples import NewExamples
from datastore.memory import memory_store
from datastore.policy.catalogue import PolicyName
from datastore.prediction.classifier import NeighborClassifier
from datastore.settings import StoreSettings
from datastore.store import Store
from datastore.tuning.candidates import weights_to_choose_from
from datastore.tuning.mixing import choose_knn_weight
from knnper.config.ranges import PositiveFraction, UnitInterval
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from simulation.figures.drift_alarms import AlarmSettings, alarm_steps
from simulation.figures.drift_streams import DriftStream, StreamSettings
from simulation.figures.embedded import Embedded, Embedder
from simulation.figures.folder import PartRecord
from simulation.figures.knn_weight import num_correct
from strategies.core.memory import KnnSettings

STRATEGIES: tuple[PolicyName, ...] = ("fixed", "fifo", "concatenate")


@dataclass(frozen=True)
class DriftSettings(Settings):
    """What the drift figure shows.

    Attributes
    ----------
    streams
        What arrives where and when.
    knn
        k, kernel, σ and the grid of λ.
    knn_weight
        λ of all clients; null lets each choose once, on a part of its first store,
        looked up in the rest of it.
    held_out
        That part, (0, 1].
    alarms
        When clients notice the shift.
    """

    streams: StreamSettings = field(default_factory=StreamSettings)
    knn: KnnSettings = field(default_factory=KnnSettings)
    knn_weight: UnitInterval | None = None
    held_out: PositiveFraction = 0.2
    alarms: AlarmSettings = field(default_factory=AlarmSettings)


@dataclass(frozen=True, eq=False)
class ClientDrift:
    """One client's stream, embedded.

    Attributes
    ----------
    initial
        The first store.
    batches
        What arrives.
    tests
        Test images of before and after.
    """

    initial: Embedded
    batches: tuple[Embedded, ...]
    tests: tuple[Embedded, Embedded]

    @classmethod
    def of(cls, stream: DriftStream, embedder: Embedder) -> "ClientDrift":
        """Return the stream as the global model sees it."""
        before, after = stream.tests
        return cls(
            embedder.train(stream.initial),
            tuple(embedder.train_in_parts(stream.batches)),
            (embedder.test(before), embedder.test(after)),
        )


def follow_client(
    client: ClientDrift, settings: DriftSettings, key: RandomKey
) -> PartRecord:
    """Return how often one client is right after each number of batches.

    After t < t_0 batches the test images are those of before the shift, from t_0 on
    those of after it.

    Returns
    -------
    Mapping
        ``correct`` and ``num_stored`` of each strategy, T + 1 numbers each; the others
        are one number each, or one for before and one for after.
    """
    fitted, held_out = _split(client.initial, settings.held_out)
    knn_weight = settings.knn_weight
    if knn_weight is None:
        knn_weight = _tuned(fitted, held_out, settings.knn)
    curves = {
        strategy: list(_curve(client, strategy, knn_weight, settings))
        for strategy in STRATEGIES
    }
    return {
        "knn_weight": knn_weight,
        "num_test": [len(test) for test in client.tests],
        "global_correct": [test.num_correct() for test in client.tests],
        "correct": {name: [one for one, _ in curves[name]] for name in curves},
        "num_stored": {name: [size for _, size in curves[name]] for name in curves},
        "alarmed_at": alarm_steps(
            fitted, held_out, client.batches, settings.alarms, key
        ),
    }


def _split(initial: Embedded, fraction: float) -> tuple[Embedded, Embedded]:
    """Return the first store less its last part, and that part: it is in no order."""
    count = min(round(fraction * len(initial)), len(initial) - 1)
    return initial.slice(0, len(initial) - count), initial.slice(
        len(initial) - count, len(initial)
    )


def _tuned(fitted: Embedded, held_out: Embedded, knn: KnnSettings) -> float:
    if len(held_out) == 0:
        return weights_to_choose_from(knn.knn_weights)[0]
    local = _classifier(_store(fitted, "concatenate"), knn)(held_out.embeddings)
    return choose_knn_weight(
        local, held_out.probabilities, held_out.labels, knn.knn_weights
    )


def _curve(
    client: ClientDrift,
    strategy: PolicyName,
    knn_weight: float,
    settings: DriftSettings,
) -> Iterator[tuple[int, int]]:
    """Yield correct test images and stored examples after 0 ... T batches."""
    store = _store(client.initial, strategy)
    predict = _classifier(store, settings.knn)
    shift_at = settings.streams.shift_at
    correct: int | None = None
    for step in range(len(client.batches) + 1):
        changed = step > 0 and _add(store, client.batches[step - 1])
        if changed or step == shift_at:
            correct = None
        # What did not change need not be looked up again.
        if correct is None:
            test = client.tests[step >= shift_at]
            correct = _num_correct(predict, test, knn_weight)
        yield correct, len(store)


def _num_correct(
    predict: Callable[[Tensor], Tensor], test: Embedded, knn_weight: float
) -> int:
    local = predict(test.embeddings)
    return num_correct(local, test.probabilities, test.labels, knn_weight)


def _store(initial: Embedded, strategy: PolicyName) -> Store:
    bounded = strategy != "concatenate"
    capacity = len(initial) if bounded else None
    return memory_store(
        initial.embeddings,
        initial.labels,
        initial.probabilities.shape[1],
        StoreSettings(policy=strategy, capacity=capacity),
    )


def _add(store: Store, batch: Embedded) -> bool:
    """Offer a batch; return whether the store is another one now."""
    if len(batch) == 0:
        return False
    added = store.add(NewExamples(batch.embeddings, batch.labels))
    return bool((added.ids >= 0).any()) or len(added.evicted) > 0


def _classifier(store: Store, knn: KnnSettings) -> NeighborClassifier:
    return NeighborClassifier(store, knn.num_neighbors, knn.kernel, knn.kernel_scale)
