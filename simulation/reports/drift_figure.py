"""How the accuracy follows a shift under each policy of the store.

knn-per.txt, Appendix B, "Robustness to distribution shift", Figure 14.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from knnper.datastore.examples import NewExamples
from knnper.datastore.policy import PolicyName
from knnper.datastore.prediction import NeighborClassifier
from knnper.datastore.settings import StoreSettings
from knnper.datastore.store import Store, memory_store
from knnper.datastore.tuning import choose_knn_weight, weights_to_choose_from
from knnper.errors import RunError
from knnper.experiment import (
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Settings,
    UnitInterval,
)
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import Assignment, Integers
from knnper.simulation.partition.schemes import DirichletSettings, dirichlet
from knnper.simulation.partition.split import client_names
from knnper.simulation.reports.drift_alarm import (
    DriftAlarm,
    Scores,
    label_scores,
    neighbor_scores,
)
from knnper.simulation.reports.figure import (
    SOFT,
    DriftOptions,
    FigureFolder,
    OnPart,
    PartRecord,
    accuracy_axis,
    identity_of,
    styled,
)
from knnper.simulation.reports.memory_figures import (
    Embedded,
    Embedder,
    knn_settings,
    num_correct_,
)
from knnper.simulation.reports.tables import Chart, Shown, Table, percent
from knnper.simulation.trained_model import TrainedModel
from knnper.strategies.core.memory import KnnSettings


def _distance(memory: Store, examples: Embedded, num_neighbors: int) -> Scores:
    return neighbor_scores(memory, examples.embeddings, num_neighbors)


def _distance_to_label(memory: Store, examples: Embedded, num_neighbors: int) -> Scores:
    return label_scores(memory, examples.embeddings, examples.labels, num_neighbors)


ALARMS: Mapping[str, Callable[[Store, Embedded, int], Scores]] = MappingProxyType(
    {"distance": _distance, "distance_to_own_label": _distance_to_label}
)
"""What is watched, by name."""


@dataclass(frozen=True)
class AlarmSettings(Settings):
    """How readily an alarm goes off.

    Attributes
    ----------
    run_length
        h, the examples that may pass between false alarms.
    num_neighbors
        k of the mean distance that is watched.
    """

    run_length: PositiveFloat = 10_000.0
    num_neighbors: PositiveInt = 5


def alarm_steps(
    fitted: Embedded,
    held_out: Embedded,
    batches: Sequence[Embedded],
    settings: AlarmSettings,
    key: RandomKey,
) -> Mapping[str, int | None]:
    """Return after how many batches each of `ALARMS` went off; None if it did not.

    Parameters
    ----------
    fitted
        What distances are measured to, all the time.
    held_out
        The reference: from before the shift, and not among ``fitted``.
    batches
        What arrives.
    settings
        Of the alarms.
    key
        Of their tie-breaks.
    """
    if len(held_out) == 0:
        return dict.fromkeys(ALARMS)
    memory = memory_store(
        fitted.embeddings, fitted.labels, fitted.probabilities.shape[1]
    )
    count = settings.num_neighbors
    return {
        kind: _alarm_step(
            DriftAlarm(settings.run_length, key.child(kind)),
            score(memory, held_out, count),
            (score(memory, batch, count) for batch in batches),
        )
        for kind, score in ALARMS.items()
    }


def _alarm_step(
    alarm: DriftAlarm, reference: Scores, batches: Iterable[Scores]
) -> int | None:
    state = alarm.start(reference)
    for step, scores in enumerate(batches, start=1):
        state = alarm.update(state, scores)
        if state.alarmed_at is not None:
            return step
    return None


@dataclass(frozen=True)
class StreamSettings(Settings):
    """How the images are dealt and arrive.

    Attributes
    ----------
    num_clients
        M; 100 in the paper.
    alpha
        Of both Dirichlet draws; 0.3 in the paper.
    num_steps
        T, batches that arrive in all; 100 in the paper.
    shift_at
        t_0, the batches among them from before the shift; 50 in the paper.
    """

    num_clients: PositiveInt = DriftOptions.clients
    alpha: PositiveFloat = DriftOptions.alpha
    num_steps: PositiveInt = DriftOptions.steps
    shift_at: PositiveInt = DriftOptions.shift_at


@dataclass(frozen=True, eq=False)
class DriftStream:
    """One client's images, as indices into a data set's splits.

    Attributes
    ----------
    initial
        Training images in the store at first.
    batches
        T batches of training images, in the order in which they arrive; of a small
        client some are empty.
    tests
        Test images of the distribution before and after the shift.
    """

    initial: Integers
    batches: tuple[Integers, ...]
    tests: tuple[Integers, Integers]


FEWEST_IMAGES = 10
"""Training images of a client on average; with fewer, most batches are empty."""


def require_enough_images(num_train: int, num_clients: int) -> None:
    """Refuse more clients than there are images for.

    Parameters
    ----------
    num_train
        Training images of all clients.
    num_clients
        M.

    Raises
    ------
    RunError
        With the most clients there can be.
    """
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
    settings: StreamSettings,
    key: RandomKey,
) -> tuple[DriftStream, ...]:
    """Return the stream of each client.

    knn-per.txt, Appendix B, "Robustness to distribution shift": p_y and p'_y are drawn
    for each label, and each of them deals all images. Half of a client's training
    images from p is its first store, the rest its first t_0 batches; those from p' are
    the other T - t_0. Where p' gave a client more training images than p, the two are
    swapped for that client: so |S_m| ≥ |S'_m| (footnote 6) and no image is left out.

    Parameters
    ----------
    train_labels, test_labels
        int64, shapes (n_train,) and (n_test,).
    settings
        Numbers of clients and steps.
    key
        Fixes every random choice.
    """
    one, other = (
        dirichlet(
            train_labels,
            test_labels,
            DirichletSettings(num_clients=settings.num_clients, alpha=settings.alpha),
            key.child("draw", number),
        )
        for number in (1, 2)
    )
    return tuple(
        _stream(client, one, other, settings, key.child("order", client))
        for client in range(settings.num_clients)
    )


def _stream(
    client: int,
    one: Assignment,
    other: Assignment,
    settings: StreamSettings,
    key: RandomKey,
) -> DriftStream:
    if len(one.train[client]) < len(other.train[client]):
        one, other = other, one
    before = key.child("before").numpy().permutation(one.train[client])
    after = key.child("after").numpy().permutation(other.train[client])
    half = (len(before) + 1) // 2
    num_after = settings.num_steps - settings.shift_at
    batches = [
        *np.array_split(before[half:], settings.shift_at),
        *np.array_split(after, num_after),
    ]
    tests = one.test[client], other.test[client]
    return DriftStream(before[:half], tuple(batches), tests)


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
    return num_correct_(local, test.probabilities, test.labels, knn_weight)


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


GLOBAL = "global"


@dataclass(frozen=True)
class DriftCurves:
    """What all clients together show; lists have T + 1 entries, 0 ... T batches.

    Attributes
    ----------
    accuracy
        Of each strategy and of the global model, over all clients' test images.
    mean_stored
        Stored examples of a client, by strategy.
    alarmed
        Of each alarm, the part of the clients in which it has gone off.
    mean_knn_weight
        λ, over the clients.
    num_clients
        Clients in the figure.
    """

    accuracy: dict[str, list[float]]
    mean_stored: dict[str, list[float]]
    alarmed: dict[str, list[float]]
    mean_knn_weight: float
    num_clients: int


def drift_curves(
    records: Sequence[PartRecord], num_steps: int, shift_at: int
) -> DriftCurves:
    """Return what the clients' records show together.

    Parameters
    ----------
    records
        Of `follow_client`, one a client.
    num_steps, shift_at
        T and t_0.
    """
    steps = range(num_steps + 1)
    sides = [int(step >= shift_at) for step in steps]
    count = len(records)
    return DriftCurves(
        accuracy=dict(_accuracies(records, sides)),
        mean_stored={
            name: [total / count for total in _totals(records, "num_stored", name)]
            for name in STRATEGIES
        },
        alarmed={
            name: [_fraction_alarmed(records, name, step) for step in steps]
            for name in ALARMS
        },
        mean_knn_weight=sum(one["knn_weight"] for one in records) / count,
        num_clients=count,
    )


def _accuracies(
    records: Sequence[PartRecord], sides: Sequence[int]
) -> Iterator[tuple[str, list[float]]]:
    """Yield the accuracy of each strategy, and of the global model, at each step."""
    num_test = _columns(one["num_test"] for one in records)
    of_global = _columns(one["global_correct"] for one in records)
    curves = {name: _totals(records, "correct", name) for name in STRATEGIES}
    for name, curve in (*curves.items(), (GLOBAL, [of_global[at] for at in sides])):
        pairs = zip(curve, sides, strict=True)
        yield name, [right / max(num_test[side], 1) for right, side in pairs]


def _totals(records: Sequence[PartRecord], figure: str, strategy: str) -> list[int]:
    return _columns(one[figure][strategy] for one in records)


def _columns(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of each column."""
    return [sum(column) for column in zip(*rows, strict=True)]


def _fraction_alarmed(records: Sequence[PartRecord], alarm: str, step: int) -> float:
    """Return the part of the clients in which an alarm went off by ``step``."""
    times: list[int | None] = [one["alarmed_at"][alarm] for one in records]
    return sum(at is not None and at <= step for at in times) / len(times)


NAME = "drift"

TITLE = "A shift of the clients' data (Figure 14)"

_LABELS = {
    "concatenate": "Concatenate",
    "fifo": "FIFO",
    "fixed": "Fixed datastore",
    GLOBAL: "Global model",
    "distance": "distance to the neighbours",
    "distance_to_own_label": "distance to those of its label",
}


def show_drift(
    model: TrainedModel, output: Path, options: DriftOptions, on_part: OnPart
) -> Shown:
    """Make the figure as `draw_drift` does; return what it shows."""
    streams = StreamSettings(
        options.clients, options.alpha, options.steps, options.shift_at
    )
    knn = knn_settings(model.experiment)
    settings = DriftSettings(streams, knn, options.knn_weight)
    curves = draw_drift(model, output, settings, options.seed, on_part)
    draw = functools.partial(_picture, curves, streams.shift_at)
    return Shown((_table(curves, streams),), (Chart(NAME, TITLE, draw),))


def _table(curves: DriftCurves, streams: StreamSettings) -> Table:
    moments = (0, streams.shift_at - 1, streams.shift_at, streams.num_steps)
    lines = {
        **curves.accuracy,
        **{f"clients alarmed, {name}": one for name, one in curves.alarmed.items()},
    }
    return Table(
        TITLE,
        ("batches received", *map(str, moments)),
        tuple(
            (name, *(percent(line[at]) for at in moments))
            for name, line in lines.items()
        ),
    )


def draw_drift(
    model: TrainedModel,
    output: Path,
    settings: DriftSettings,
    seed: int,
    on_part: OnPart,
) -> DriftCurves:
    """Make the figure in the folder ``output``; go on with it where it was left.

    Writes drift.csv, .png, .svg, .pdf and .json.

    Parameters
    ----------
    model
        The global model.
    output
        The folder.
    settings
        What is shown.
    seed
        Fixes every random choice.
    on_part
        Is told of every client that is done.

    Raises
    ------
    RunError
        If the folder holds something else, or there are too few images for so many
        clients.
    """
    require_enough_images(len(model.dataset.train.labels), settings.streams.num_clients)
    identity = identity_of(NAME, model, settings, seed)
    key = RandomKey(seed).child(NAME)
    with FigureFolder.open(output, identity) as folder:
        records = _records(model, folder, settings, key, on_part)
        curves = drift_curves(
            records, settings.streams.num_steps, settings.streams.shift_at
        )
        _write(folder, curves, settings)
        details = {
            "run": model.experiment.name,
            "num_clients": curves.num_clients,
            "mean_knn_weight": curves.mean_knn_weight,
        }
        folder.write_description(identity, records, details)
    return curves


def _records(
    model: TrainedModel,
    folder: FigureFolder,
    settings: DriftSettings,
    key: RandomKey,
    on_part: OnPart,
) -> list[PartRecord]:
    data = model.dataset
    streams = drift_streams(
        data.train.labels, data.test.labels, settings.streams, key.child("streams")
    )
    # A client without a first store follows no policy.
    stream_of = {
        name: stream
        for name, stream in zip(client_names(len(streams)), streams, strict=True)
        if len(stream.initial) > 0
    }
    embedder = Embedder(model)

    def follow(name: str) -> PartRecord:
        client = ClientDrift.of(stream_of[name], embedder)
        return follow_client(client, settings, key.child("alarms", name))

    return folder.finish(list(stream_of), follow, on_part)


def _write(folder: FigureFolder, curves: DriftCurves, settings: DriftSettings) -> None:
    columns: list[tuple[str, list[float]]] = [
        *((f"accuracy_{name}", curve) for name, curve in curves.accuracy.items()),
        *((f"mean_stored_{name}", curve) for name, curve in curves.mean_stored.items()),
        *((f"alarmed_{name}", curve) for name, curve in curves.alarmed.items()),
    ]
    rows = zip(*(curve for _, curve in columns), strict=True)
    folder.write_csv(
        f"{NAME}.csv",
        ["num_batches", *(name for name, _ in columns)],
        ([step, *row] for step, row in enumerate(rows)),
    )
    folder.write_pictures(NAME, _picture(curves, settings.streams.shift_at))


@styled
def _picture(curves: DriftCurves, shift_at: int) -> Figure:
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, accuracy in curves.accuracy.items():
        style = {"color": SOFT.light, "linestyle": ":"} if name == GLOBAL else {}
        top.plot(accuracy, label=_LABELS[name], **style)
    accuracy_axis(top)
    top.legend()
    top.set_title(f"A shift after {shift_at} batches, {curves.num_clients} clients")
    for name, fraction in curves.alarmed.items():
        bottom.plot(fraction, label=_LABELS[name])
    accuracy_axis(bottom, "clients alarmed")
    bottom.set_ylim(-0.03, 1.03)
    bottom.set_xlabel("time step (batches received)")
    bottom.legend()
    for axes in (top, bottom):
        axes.axvline(shift_at, color=SOFT.light, linestyle="--", linewidth=1)
    return figure
