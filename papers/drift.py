"""Accuracy under a shift of the clients' data, for each eviction policy of the store.

Marfoq et al. 2022, Appendix B, "Robustness to distribution shift", Figures 4 and 14.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from knnper import (
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RandomKey,
    RunError,
    Settings,
    UnitInterval,
)
from knnper.datastore.examples import NewExamples
from knnper.datastore.memory import KnnSettings
from knnper.datastore.policy import PolicyName, StoreSettings
from knnper.datastore.store import Store
from knnper.datastore.tuning import choose_knn_weight, knn_weight_grid
from knnper.simulation.partition.allocation import Integers
from knnper.simulation.partition.dirichlet import DirichletSettings, dirichlet
from knnper.simulation.partition.split import client_names
from knnper.simulation.reports.figure import SOFT, accuracy_axis, styled
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import percent
from knnper.simulation.trained_model import TrainedModel
from papers.drift_alarm import DriftAlarm, Scores, label_scores, neighbor_scores
from papers.figures import Drawing, FigureFolder, PartRecord, knn_settings
from papers.new_clients import Embedded, classifier, embed

# Mean number of training images per client; with fewer, most batches are empty.
FEWEST_IMAGES = 10
STRATEGIES: tuple[PolicyName, ...] = ("fixed", "fifo", "concatenate")
GLOBAL = "global"
TITLE = "A shift of the clients' data (Figure 14)"
_LABELS = {
    "concatenate": "Concatenate",
    "fifo": "FIFO",
    "fixed": "Fixed datastore",
    GLOBAL: "Global model",
    "distance": "distance to the neighbours",
    "distance_to_own_label": "distance to those of its label",
}


@dataclass(frozen=True)
class DriftSettings(Settings):
    """Settings of the streams of images, and of the alarms that detect a shift.

    Attributes
    ----------
    clients
        M, the number of clients.
    steps
        T, the number of batches.
    shift_at
        t0, the number of batches before the shift; less than ``steps``.
    alpha
        α of both Dirichlet draws.
    knn_weight
        λ of all clients. With null, each client chooses λ once, on a held-out part of
        its first store.
    seed
        Seed of every random choice.
    held_out
        Fraction of this held-out part.
    run_length
        h, the mean number of examples between false alarms.
    alarm_neighbors
        k of the mean distance monitored by alarms.
    """

    clients: PositiveInt = 100
    steps: Annotated[int, Field(ge=2)] = 100
    shift_at: PositiveInt = 50
    alpha: PositiveFloat = 0.3
    knn_weight: UnitInterval | None = None
    seed: NonNegativeInt = 0
    held_out: PositiveFraction = 0.2
    run_length: PositiveFloat = 10_000.0
    alarm_neighbors: PositiveInt = 5

    def __post_init__(self) -> None:
        if self.shift_at >= self.steps:
            raise ValueError(
                f"found shift_at {self.shift_at} with steps {self.steps}, expected "
                "shift_at below steps"
            )


# Monitored scores by name.
ALARMS: Mapping[str, Callable[[Store, Embedded, int], Scores]] = {
    "distance": lambda memory, examples, k: neighbor_scores(
        memory, examples.embeddings, k
    ),
    "distance_to_own_label": lambda memory, examples, k: label_scores(
        memory, examples.embeddings, examples.labels, k
    ),
}


def alarm_steps(
    fitted: Embedded,
    held_out: Embedded,
    batches: Sequence[Embedded],
    settings: DriftSettings,
    key: RandomKey,
) -> Mapping[str, int | None]:
    """Return the batch in which each of `ALARMS` went off, or None."""
    if len(held_out) == 0:
        return dict.fromkeys(ALARMS)
    memory = fitted.store()
    step_of: dict[str, int | None] = {}
    for kind, score in ALARMS.items():
        alarm = DriftAlarm(settings.run_length, key.child(kind))
        state = alarm.start(score(memory, held_out, settings.alarm_neighbors))
        step_of[kind] = None
        for step, batch in enumerate(batches, start=1):
            arriving = score(memory, batch, settings.alarm_neighbors)
            state = alarm.update(state, arriving)
            if state.alarmed_at is not None:
                step_of[kind] = step
                break
    return step_of


@dataclass(frozen=True, eq=False)
class DriftStream:
    """One client's images, as indices into a data set's splits."""

    initial: Integers
    batches: tuple[Integers, ...]
    tests: tuple[Integers, Integers]


def require_enough_images(num_train: int, num_clients: int) -> None:
    """Raise if there are too few training images for the clients."""
    most = num_train // FEWEST_IMAGES
    if num_clients > most:
        raise RunError(
            f"found {num_clients} clients, expected at most {most}: there are "
            f"{num_train} training images, and a client needs {FEWEST_IMAGES} on "
            "average; give fewer clients"
        )


def drift_streams(
    train_labels: Integers,
    test_labels: Integers,
    settings: DriftSettings,
    key: RandomKey,
) -> tuple[DriftStream, ...]:
    """Draw the stream of each client, given the labels (n_train,) and (n_test,)."""
    drawn = DirichletSettings(num_clients=settings.clients, alpha=settings.alpha)
    pairs = [
        dirichlet(train_labels, test_labels, drawn, key.child("draw", number))
        for number in (1, 2)
    ]

    def stream(client: int) -> DriftStream:
        first, other = pairs
        if len(first.train[client]) < len(other.train[client]):
            first, other = other, first
        order = key.child("order", client)
        before = order.child("before").numpy().permutation(first.train[client])
        after = order.child("after").numpy().permutation(other.train[client])
        half = (len(before) + 1) // 2
        batches = (
            *np.array_split(before[half:], settings.shift_at),
            *np.array_split(after, settings.steps - settings.shift_at),
        )
        tests = first.test[client], other.test[client]
        return DriftStream(before[:half], batches, tests)

    return tuple(map(stream, range(settings.clients)))


@dataclass(frozen=True, eq=False)
class ClientDrift:
    """One client's stream, embedded by the global model."""

    initial: Embedded
    batches: tuple[Embedded, ...]
    tests: tuple[Embedded, Embedded]

    @classmethod
    def of(cls, stream: DriftStream, model: TrainedModel) -> "ClientDrift":
        """Embed a stream; all batches at once, which is faster."""
        data, (before, after) = model.dataset, stream.tests
        arriving = embed(model, data.train, np.concatenate(stream.batches))
        ends = np.cumsum([len(batch) for batch in stream.batches]).tolist()
        starts = [0, *ends[:-1]]
        return cls(
            embed(model, data.train, stream.initial),
            tuple(
                arriving.at(slice(*bounds)) for bounds in zip(starts, ends, strict=True)
            ),
            (embed(model, data.test, before), embed(model, data.test, after)),
        )


def follow_client(
    client: ClientDrift, settings: DriftSettings, knn: KnnSettings, key: RandomKey
) -> PartRecord:
    """Count the correct predictions of one client after each number of batches."""
    count = len(client.initial)
    num_fitted = count - min(round(settings.held_out * count), count - 1)
    fitted = client.initial.first(num_fitted)
    held_out = client.initial.at(slice(num_fitted, count))
    weight = settings.knn_weight
    if weight is None:
        weight = _chosen(fitted, held_out, knn)
    curves = {
        strategy: list(_curve(client, strategy, weight, settings.shift_at, knn))
        for strategy in STRATEGIES
    }
    return {
        "knn_weight": weight,
        "num_test": [len(test) for test in client.tests],
        "global_correct": [test.num_correct() for test in client.tests],
        "correct": {
            name: [strategy for strategy, _ in curves[name]] for name in curves
        },
        "num_stored": {name: [size for _, size in curves[name]] for name in curves},
        "alarmed_at": alarm_steps(fitted, held_out, client.batches, settings, key),
    }


def _chosen(fitted: Embedded, held_out: Embedded, knn: KnnSettings) -> float:
    if len(held_out) == 0:
        return knn_weight_grid(knn.knn_weights)[0]
    local = classifier(fitted.store(), knn)(held_out.embeddings)
    return choose_knn_weight(
        local, held_out.probabilities, held_out.labels, knn.knn_weights
    )


def _curve(
    client: ClientDrift,
    strategy: PolicyName,
    knn_weight: float,
    shift_at: int,
    knn: KnnSettings,
) -> Iterator[tuple[int, int]]:
    """Yield counts of correct test images and stored examples after each batch."""
    capacity = None if strategy == "concatenate" else len(client.initial)
    store = client.initial.store(StoreSettings(policy=strategy, capacity=capacity))
    predict = classifier(store, knn)
    correct: int | None = None
    for step in range(len(client.batches) + 1):
        changed = step > 0 and _add(store, client.batches[step - 1])
        # An unchanged store gives the same predictions.
        if changed or step == shift_at or correct is None:
            test = client.tests[step >= shift_at]
            correct = test.num_correct(predict(test.embeddings), knn_weight)
        yield correct, len(store)


def _add(store: Store, batch: Embedded) -> bool:
    """Offer a batch to the store; return whether the store has changed."""
    if len(batch) == 0:
        return False
    added = store.add(NewExamples(batch.embeddings, batch.labels))
    return bool((added.ids >= 0).any()) or len(added.evicted) > 0


@dataclass(frozen=True)
class DriftCurves:
    """Results over all clients; lists have T + 1 entries, for 0 ... T batches."""

    accuracy: Mapping[str, list[float]]
    mean_stored: Mapping[str, list[float]]
    alarmed: Mapping[str, list[float]]


def drift_curves(
    records: Sequence[PartRecord], num_steps: int, shift_at: int
) -> DriftCurves:
    """Aggregate the records of `follow_client` over clients."""

    def sums(rows: Iterable[Sequence[int]]) -> list[int]:
        return [sum(column) for column in zip(*rows, strict=True)]

    steps = range(num_steps + 1)
    count = len(records)
    sides = [int(step >= shift_at) for step in steps]
    num_test = sums(key["num_test"] for key in records)
    of_global = sums(key["global_correct"] for key in records)
    correct: dict[str, list[int]] = {
        key: sums(it["correct"][key] for it in records) for key in STRATEGIES
    }
    correct[GLOBAL] = [of_global[side] for side in sides]
    stored = {key: sums(it["num_stored"][key] for it in records) for key in STRATEGIES}
    alarms = {name: [key["alarmed_at"][name] for key in records] for name in ALARMS}

    def accuracies(curve: Sequence[int]) -> list[float]:
        pairs = zip(curve, sides, strict=True)
        return [right / max(num_test[side], 1) for right, side in pairs]

    def alarmed(times: Sequence[int | None], step: int) -> float:
        return sum(at is not None and at <= step for at in times) / count

    return DriftCurves(
        {name: accuracies(curve) for name, curve in correct.items()},
        {name: [total / count for total in totals] for name, totals in stored.items()},
        {
            name: [alarmed(client_steps, step) for step in steps]
            for name, client_steps in alarms.items()
        },
    )


def draw_drift(
    model: TrainedModel, settings: DriftSettings, folder: FigureFolder
) -> list[Drawing]:
    """Draw the figure."""
    train, test = model.dataset.train.labels, model.dataset.test.labels
    require_enough_images(len(train), settings.clients)
    key = RandomKey(settings.seed).child("drift")
    streams = drift_streams(train, test, settings, key.child("streams"))
    # A client without a first store has no policy to follow.
    stream_of = {
        name: stream
        for name, stream in zip(client_names(len(streams)), streams, strict=True)
        if len(stream.initial) > 0
    }
    knn = knn_settings(model.experiment)

    def follow(name: str) -> PartRecord:
        client = ClientDrift.of(stream_of[name], model)
        return follow_client(client, settings, knn, key.child("alarms", name))

    records = folder.finish(stream_of, follow)
    count = len(records)
    curves = drift_curves(records, settings.steps, settings.shift_at)
    columns = {
        f"{group}_{name}": line
        for group, lines in vars(curves).items()
        for name, line in lines.items()
    }
    rows = zip(range(settings.steps + 1), *columns.values(), strict=True)
    return [
        Drawing(
            name="drift",
            title=TITLE,
            tables=(_table(curves, settings),),
            header=("num_batches", *columns),
            rows=rows,
            figure=_picture(curves, settings.shift_at, count),
            records=records,
            details={
                "num_clients": count,
                "mean_knn_weight": sum(record["knn_weight"] for record in records)
                / count,
            },
        )
    ]


def _table(curves: DriftCurves, settings: DriftSettings) -> Table:
    shift, num_after = settings.shift_at, settings.steps - settings.shift_at
    after = {shift + num_after // 10, shift + num_after // 2, settings.steps}
    moments = sorted({0, shift - 1, shift, *after})
    alarmed = {
        f"clients alarmed, {name}": counts for name, counts in curves.alarmed.items()
    }
    return Table(
        TITLE,
        ("batches received", *map(str, moments)),
        tuple(
            (name, *(percent(line[at]) for at in moments))
            for name, line in {**curves.accuracy, **alarmed}.items()
        ),
    )


@styled
def _picture(curves: DriftCurves, shift_at: int, num_clients: int) -> Figure:
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, accuracy in curves.accuracy.items():
        style = {"color": SOFT.light, "linestyle": ":"} if name == GLOBAL else {}
        top.plot(accuracy, label=_LABELS[name], **style)
    accuracy_axis(top)
    top.legend()
    top.set_title(f"A shift after {shift_at} batches, {num_clients} clients")
    for name, fraction in curves.alarmed.items():
        bottom.plot(fraction, label=_LABELS[name])
    accuracy_axis(bottom, "clients alarmed")
    bottom.set_ylim(-0.03, 1.03)
    bottom.set_xlabel("time step (batches received)")
    bottom.legend()
    for axes in (top, bottom):
        axes.axvline(shift_at, color=SOFT.light, linestyle="--", linewidth=1)
    return figure
