"""Three approaches on a synthetic mixture: Mansour et al. 2020, Figure 2 and Table 1.

Test loss by samples per user, and of HypCluster by the number of clusters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from knnper import ClientData, NonNegativeInt, PositiveInt, Settings
from knnper.data.synthetic_mixture import SyntheticMixtureSettings, density
from knnper.experiment_file import load_experiment, results_identity
from knnper.server.rounds import untrained
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.figure import SOFT, colors_of, styled
from knnper.simulation.reports.table import Table
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies import evaluate
from papers.figures import Drawing, FigureFolder, PartRecord, serial_rounds

_SOME = Field(min_length=1)
SampleCount = Annotated[int, Field(ge=3)]  # one is left for validation

# Sections of an experiment, each with the settings that differ from the others'.
Sections = Mapping[str, Mapping[str, Any]]

PASSES = 5  # over a client's data, wherever one trains for itself

# Of which a client's own training takes the best on validation data.
RATES = (0.3, 1.0, 3.0)

# Of which FedAvg and HypCluster take theirs; what goes on from FedAvg has 1.
TOGETHER = (0.1, 0.3, 1.0)
HYPCLUSTER = "HypCluster (4)"
TITLE = "Clusters, mixed data and mixed models on synthetic users (Figure 2)"
_MARKERS = "osv^D*P"

# Names of methods in reports, by title.
_METHODS = {"Global (FedAvg)": "FedAvg"}

# Records by title and position on the horizontal axis, one per seed.
Lines = Mapping[str, Sequence[Sequence[PartRecord]]]
_HEADER = (
    "seed",
    "samples",
    "clusters",
    "approach",
    "validation_loss",
    "test_loss",
    "chosen",
)


@dataclass(frozen=True)
class ThreeApproachesSettings(Settings):
    """Settings of the figure.

    Attributes
    ----------
    samples
        m, the number of examples per user: the points of the left half.
    clusters
        q of HypCluster: the points of the right half.
    users
        p, the number of users.
    seeds
        Seeds of every random choice, including the users' samples.
    samples_for_clusters
        m in the right half.
    num_starts
        Number of HypCluster runs with different seeds; the one with the best validation
        loss counts.
    num_rounds
        Number of rounds of all methods with rounds.
    """

    samples: Annotated[tuple[SampleCount, ...], _SOME] = (3, 5, 10, 30, 100, 200)
    clusters: Annotated[tuple[PositiveInt, ...], _SOME] = (1, 2, 3, 4, 5, 6, 8)
    users: PositiveInt = 100
    seeds: Annotated[tuple[NonNegativeInt, ...], _SOME] = (0, 1, 2)
    samples_for_clusters: SampleCount = 100
    num_starts: PositiveInt = 3
    num_rounds: PositiveInt = 10


@dataclass(frozen=True)
class CandidateSettings:
    """Settings of a candidate; the best on validation data is chosen."""

    trained: Sections
    served: Sections
    chosen: Mapping[str, float]


def _of_rates(
    trained: Sections,
    section: str,
    settings: Mapping[str, Any],
    key: str = "learning_rate",
) -> tuple[CandidateSettings, ...]:
    """Return a candidate for each learning rate, set under ``key`` of a section."""
    return tuple(
        CandidateSettings(
            trained, {section: {**settings, key: rate}}, {"learning_rate": rate}
        )
        for rate in RATES
    )


_FEDAVG: Sections = {"method": {"name": "fedavg"}}
_MAPPER = {"name": "mapper", "local_epochs": PASSES}

_WITH_PROXY: Sections = {
    **_FEDAVG,
    "personalization": {"name": "dapper"},
    "partition": {"proxy_fraction": 0.1},
}


def hypcluster(
    num_clusters: int, starts: Iterable[int], rates: Iterable[float] = TOGETHER
) -> tuple[CandidateSettings, ...]:
    """Return candidates of HypCluster with several seeds and learning rates."""
    method = {"name": "hypcluster", "num_clusters": num_clusters}
    return tuple(
        CandidateSettings(
            {
                "method": method,
                "training": {"learning_rate": rate},
                "run": {"seed": start},
            },
            {},
            {"learning_rate": rate, "start": start},
        )
        for start in starts
        for rate in rates
    )


# By title, without HypCluster, since its starts depend on the seed.
APPROACHES: Mapping[str, tuple[CandidateSettings, ...]] = {
    "Global (FedAvg)": tuple(
        CandidateSettings(
            {**_FEDAVG, "training": {"learning_rate": rate}},
            {},
            {"learning_rate": rate},
        )
        for rate in TOGETHER
    ),
    "Local": _of_rates(
        {"method": {"name": "local", "num_rounds": 1}},
        "training",
        {"local_steps": None, "local_epochs": PASSES},
    ),
    "Fine-tuning": _of_rates(
        _FEDAVG, "personalization", {"name": "fine_tuning", "num_epochs": PASSES}
    ),
    "Dapper": _of_rates(
        _WITH_PROXY, "personalization", {"name": "dapper", "num_epochs": PASSES}
    ),
    "Mapper": _of_rates(
        {"method": {**_MAPPER, "local_learning_rate": 1.0}},
        "method",
        _MAPPER,
        key="local_learning_rate",
    ),
    "Mapper in two stages": _of_rates(
        _FEDAVG,
        "personalization",
        {"name": "mapper_two_stage", "local_epochs": PASSES},
        key="local_learning_rate",
    ),
}


def least_losses(num_users: int) -> Mapping[str, float]:
    """Compute the lower bound of the mean loss, by the users that share a model."""
    mixture = SyntheticMixtureSettings(num_users=num_users)
    users = range(num_users)
    densities = np.stack([density(mixture, user) for user in users])

    def least(groups: Iterable[int]) -> float:
        of_user = np.array(list(groups))
        means = [densities[of_user == group].mean(axis=0) for group in of_user]
        return float(-(densities * np.log(means)).sum(axis=1).mean())

    return {
        "one model": least(0 for _ in users),
        "a model for each cluster": least(
            user % mixture.num_clusters for user in users
        ),
        "a model for each user": least(users),
    }


class Measurements:
    """Trains and measures on one data set, of ``num_samples`` examples per user.

    Candidates with the same training share it.
    """

    def __init__(
        self, settings: ThreeApproachesSettings, seed: int, num_samples: int
    ) -> None:
        self._base = _base(settings, seed, num_samples)  # sections of all experiments
        self._trained: dict[str, Any] = {}  # states of servers, by `results_identity`

    def measure(self, candidates: Sequence[CandidateSettings]) -> PartRecord:
        """Choose the best candidate on validation data and measure its test loss."""
        tried = [
            (self._bench(candidate.trained, candidate.served), candidate)
            for candidate in candidates
        ]
        losses = [
            _mean_loss(bench, self._state(candidate.trained), on_validation=True)
            for bench, candidate in tried
        ]
        bench, best = tried[losses.index(min(losses))]
        return {
            "validation_loss": min(losses),
            "test_loss": _mean_loss(bench, self._state(best.trained)),
            "chosen": dict(best.chosen),
        }

    def _bench(self, *changes: Sections) -> Workbench:
        document: dict[str, Any] = dict(self._base)
        for sections in changes:
            for name, section in sections.items():
                is_shared = name in ("partition", "training", "run")
                document[name] = {**document[name], **section} if is_shared else section
        return open_workbench(load_experiment(document, experiment_catalogue()))

    def _state(self, trained: Sections) -> Any:
        bench = self._bench(trained)
        identity = results_identity(bench.experiment)
        if identity not in self._trained:
            self._trained[identity] = _train(bench)
        return self._trained[identity]


def _base(
    settings: ThreeApproachesSettings, seed: int, num_samples: int
) -> dict[str, Mapping[str, Any] | str]:
    return {
        "name": "three-approaches",
        "data": {
            "name": "synthetic_mixture",
            "num_users": settings.users,
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
    """Return the server's state after all rounds."""
    with serial_rounds(bench) as (loop, _):
        return loop.train(untrained(bench, bench.roster)).state


def without_validation(data: ClientData) -> ClientData:
    """Split the training data alone into training and validation data.

    The proportion is that of the given splits. A single example stays training data.
    """
    examples = data.train
    total = len(examples) + len(data.validation)
    count = round(len(examples) * len(data.validation) / max(total, 1))
    count = max(count, int(len(examples) > 1))
    order = torch.arange(len(examples))
    remaining, held_out = order[: len(order) - count], order[len(order) - count :]
    return ClientData(examples.take(remaining), examples.take(held_out))


def _mean_loss(bench: Workbench, state: Any, *, on_validation: bool = False) -> float:
    """Compute Σ -log p(y) / n over all test data, or over unused validation data."""
    total, count = 0.0, 0
    for client in bench.clients.parts:
        data = bench.clients.data(client)
        examples = data.validation if on_validation else bench.clients.test(client)
        rng = bench.key.child("broadcast", "hand-over", client)
        payload = bench.method.broadcast(state, client, rng)
        used = without_validation(data) if on_validation else data
        rng = bench.key.child("personalize", client)
        predictor = bench.method.personalize(payload, None, used, rng)
        counts = evaluate(predictor, examples)
        total, count = total + counts.log_loss_sum, count + counts.num_examples
    return float(total / count)


def draw_three_approaches(
    _: None, settings: ThreeApproachesSettings, folder: FigureFolder
) -> list[Drawing]:
    """Draw the figure."""

    def starts(seed: int) -> range:
        return range(seed, seed + settings.num_starts)

    def of_samples(count: int, seed: int) -> PartRecord:
        measurements = Measurements(settings, seed, count)
        approaches = {**APPROACHES, HYPCLUSTER: hypcluster(4, starts(seed))}
        return {
            title: measurements.measure(approach)
            for title, approach in approaches.items()
        }

    def of_clusters(count: int, seed: int) -> PartRecord:
        measurements = Measurements(settings, seed, settings.samples_for_clusters)
        return measurements.measure(hypcluster(count, starts(seed), rates=(1.0,)))

    halves = {
        "samples": (of_samples, settings.samples),
        "clusters": (of_clusters, settings.clusters),
    }
    parts = {
        f"{count} {half}, seed {seed}": (half, count, seed)
        for seed in settings.seeds
        for half, (_, counts) in halves.items()
        for count in counts
    }

    def make(part: str) -> PartRecord:
        half, count, seed = parts[part]
        measure, _ = halves[half]
        return measure(count, seed)

    records = folder.finish(parts, make)
    record_of = dict(zip(parts.values(), records, strict=True))
    by_samples: Lines = {
        title: [
            [record_of["samples", count, seed][title] for seed in settings.seeds]
            for count in settings.samples
        ]
        for title in (*APPROACHES, HYPCLUSTER)
    }
    alone = [
        [record_of["clusters", count, seed] for seed in settings.seeds]
        for count in settings.clusters
    ]
    least = least_losses(settings.users)
    tables = (
        _table("samples per user", settings.samples, by_samples),
        _table("clusters", settings.clusters, {"HypCluster": alone}),
    )
    rows = [
        _row(seed, samples, 4 if title == HYPCLUSTER else None, title, record)
        for title, line in by_samples.items()
        for samples, of_seeds in zip(settings.samples, line, strict=True)
        for seed, record in zip(settings.seeds, of_seeds, strict=True)
    ]
    rows += [
        _row(seed, settings.samples_for_clusters, clusters, "HypCluster", record)
        for clusters, of_seeds in zip(settings.clusters, alone, strict=True)
        for seed, record in zip(settings.seeds, of_seeds, strict=True)
    ]
    return [
        Drawing(
            name="three-approaches",
            title=TITLE,
            tables=tables,
            header=_HEADER,
            rows=rows,
            figure=_picture(settings, by_samples, alone, least),
            records=records,
            details={"least_loss": dict(least)},
        )
    ]


def _row(
    seed: int, samples: int, clusters: int | None, title: str, record: PartRecord
) -> Sequence[object]:
    losses = record["validation_loss"], record["test_loss"]
    chosen = ", ".join(f"{name} {value}" for name, value in record["chosen"].items())
    return (seed, samples, clusters, title, *losses, chosen)


def _losses(line: Sequence[Sequence[PartRecord]]) -> list[Estimate]:
    return [estimate(record["test_loss"] for record in of_seeds) for of_seeds in line]


def _table(axis: str, places: Sequence[int], lines: Lines) -> Table:
    of = "of HypCluster " if axis == "clusters" else ""
    return Table(
        f"Test loss (nats) {of}by {axis}",
        (axis, *map(str, places)),
        tuple(
            (title, *(loss.text(scale=1.0, digits=3) for loss in _losses(line)))
            for title, line in lines.items()
        ),
    )


@styled
def _picture(
    settings: ThreeApproachesSettings,
    by_samples: Lines,
    by_clusters: Sequence[Sequence[PartRecord]],
    least: Mapping[str, float],
) -> Figure:
    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    loss_axes, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    colors = colors_of(_METHODS.get(title, title) for title in by_samples)
    samples = settings.samples
    for (title, line), color, marker in zip(
        by_samples.items(), colors, _MARKERS, strict=True
    ):
        style = {"color": color.light, "marker": marker, "markersize": 4}
        loss_axes.plot(
            samples, [loss.mean for loss in _losses(line)], label=title, **style
        )
        if title == HYPCLUSTER:
            means = [loss.mean for loss in _losses(by_clusters)]
            right.plot(settings.clusters, means, **style)
    loss_axes.set_xscale("log")
    loss_axes.set_xticks(samples, list(map(str, samples)))
    loss_axes.minorticks_off()
    loss_axes.set_xlabel("samples per user")
    loss_axes.set_ylabel("test loss (nats)")
    right.set_xlabel(f"clusters, {settings.samples_for_clusters} samples per user")
    right.set_xticks(settings.clusters)
    for axes in (loss_axes, right):
        axes.grid(alpha=0.3)
        for loss in least.values():
            axes.axhline(loss, color=SOFT.light, linestyle=":", linewidth=1)
    _name_least(loss_axes, least)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _name_least(axes: Axes, least: Mapping[str, float]) -> None:
    """Label the lower bounds of the loss."""
    for name, loss in least.items():
        # On the left, since the curves approach the lines from above on the right.
        is_lowest = loss == min(least.values())
        axes.annotate(
            f"best with {name}",
            (0.0 if is_lowest else 1.0, loss),
            xycoords=("axes fraction", "data"),
            xytext=(3, 2) if is_lowest else (-3, -2),
            textcoords="offset points",
            horizontalalignment="left" if is_lowest else "right",
            verticalalignment="bottom" if is_lowest else "top",
            fontsize="x-small",
            color=SOFT.light,
        )
