"""Similarity of FedBasis' bases in each round, with and without its three treatments.

"Learning Shareable Bases for Personalized Federated Image Classification", section 4.2,
Figure 2.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from knnper import (
    ClientData,
    Experiment,
    Method,
    NonNegativeInt,
    RandomKey,
    RunError,
    Settings,
)
from knnper.server.checkpoints import Checkpoint
from knnper.server.distribution import ModelDistribution
from knnper.server.results import summarise_groups
from knnper.server.rounds import untrained
from knnper.settings import Choice
from knnper.simulation.reports.estimate import estimate
from knnper.simulation.reports.figure import INK, SERIES, styled
from knnper.simulation.reports.table import Table
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies import NoState
from knnper.strategies.core.evaluation import ClientResult
from knnper.strategies.core.method import changed
from knnper.strategies.fedbasis import (
    Bases,
    BasesState,
    BasesUpdate,
    FedBasisSettings,
    local_round,
)
from papers.figures import Drawing, FigureFolder, PartRecord, serial_rounds

TITLE = "What keeps FedBasis' bases apart (Figure 2)"
_ENDS = ("accuracy", "unseen_accuracy")

# Records by variant and seed.
RecordsBySeed = Mapping[str, dict[int, PartRecord]]
_COLORS = (INK, SERIES[0], SERIES[0], SERIES[1], SERIES[1])
_DASHES = ":", ":", "-", ":", "-"


@dataclass(frozen=True)
class CollapseSettings(Settings):
    """Settings of the figure.

    Attributes
    ----------
    seeds
        Seeds of the averaged runs; each replaces ``run.seed``.
    """

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0, 1, 2, 3, 4)


def without_treatments(settings: FedBasisSettings) -> FedBasisSettings:
    """Return the baseline of Eq. 7: bases and coefficients trained jointly."""
    return replace(
        settings,
        coordinate_descent=False,
        temperature=1.0,
        major_basis=False,
        warm_start_fraction=0.0,
    )


# Settings by treatment. The first three start from the same random bases.
VARIANTS: Mapping[str, Callable[[FedBasisSettings], FedBasisSettings]] = {
    "nothing": without_treatments,
    "coordinate descent": lambda settings: replace(
        without_treatments(settings), coordinate_descent=True
    ),
    "coordinate descent, sharpened": lambda settings: replace(
        without_treatments(settings),
        coordinate_descent=True,
        temperature=settings.temperature,
    ),
    "warm start": lambda settings: replace(
        without_treatments(settings), warm_start_fraction=settings.warm_start_fraction
    ),
    "all, with a major basis": lambda settings: settings,
}


@dataclass(frozen=True)
class BasesFollowed:
    """A run of FedBasis on the CPU that records similarity and entropy."""

    trained: Checkpoint
    results: Sequence[ClientResult]
    similarity: Sequence[float | None]
    entropy: Sequence[float]

    def as_record(self) -> PartRecord:
        """Return both curves, and the final ``accuracy`` and ``unseen_accuracy``."""
        groups = summarise_groups(self.results)
        return {
            "similarity": list(self.similarity),
            "entropy": list(self.entropy),
            "accuracy": groups["seen"]["accuracy_weighted"],
            "unseen_accuracy": groups["unseen"]["accuracy_weighted"],
        }


def settings_of(experiment: Experiment) -> FedBasisSettings:
    """Return the settings of the experiment's method."""
    settings = experiment.method.settings
    if not isinstance(settings, FedBasisSettings):
        raise RunError(
            f"found the method {experiment.method.name}, expected fedbasis; give "
            "another experiment"
        )
    if settings.num_bases == 1:
        raise RunError("found method.num_bases 1, expected 2 or more to compare")
    return settings


def follow_bases(bench: Workbench) -> BasesFollowed:
    """Run rounds and model distribution, and record the bases after each round."""
    recorder = _BasesRecorder(bench, settings_of(bench.experiment))
    watched = replace(bench, method=recorder.watched(bench.method))
    roster = bench.roster
    with serial_rounds(watched) as (loop, federation):
        start = untrained(watched, roster)
        trained = loop.train(start)
        handed = ModelDistribution(bench.method, federation, bench.key).personalize(
            trained, roster.sizes(), roster.seen()
        )
        results = [
            update
            for replies in handed
            for update in replies.values()
            if update is not None
        ]
    return BasesFollowed(trained, results, *recorder.curves(start.state))


@dataclass
class _BasesRecorder:
    """Records of a method during training."""

    bench: Workbench
    settings: FedBasisSettings
    similarity: dict[int, float | None] = field(default_factory=dict)
    entropies: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def watched(self, method: Method) -> Method:
        """Return ``method`` with recording in every round."""
        task, settings = self.bench.task, self.settings

        def client_update(
            payload: Bases,
            client_state: NoState | None,  # noqa: ARG001 (nothing is kept)
            data: ClientData,
            server_round: int,
            rng: RandomKey,
        ) -> tuple[NoState, BasesUpdate]:
            rate = task.training.learning_rate_at(server_round)
            alpha, update = local_round(task, settings, payload, data.train, rate, rng)
            self.entropies[server_round].append(mean_entropy(alpha))
            return NoState(), update

        def aggregate(
            state: BasesState, updates: Iterable[tuple[str, BasesUpdate]]
        ) -> BasesState:
            after: BasesState = method.aggregate(state, updates)
            self.similarity[after.num_rounds] = self._similarity_of(after)
            return after

        return changed(method, client_update=client_update, aggregate=aggregate)

    def curves(self, start: BasesState) -> tuple[list[float | None], list[float]]:
        """Return similarity and entropy, beginning before the first round."""
        similarity, entropy = [self._similarity_of(start)], [1.0]
        for server_round, of_round in sorted(self.similarity.items()):
            entropies = self.entropies[server_round]
            known = similarity[-1] is not None
            entropy.append(sum(entropies) / len(entropies) if known else 1.0)
            similarity.append(of_round)
        return similarity, entropy

    def _similarity_of(self, state: BasesState) -> float | None:
        settings = self.settings
        if len(state.models) < settings.num_models:
            return None
        bases = state.models[settings.num_models - settings.num_bases :]
        parameters = slice(0, self.bench.task.model.num_parameters)
        return mean_similarity([basis[parameters] for basis in bases])


def mean_entropy(alpha: Tensor) -> float:
    """Compute -Σ_k α_k log α_k / log K, averaged over blocks; 1 is uniform.

    ``alpha`` has shape (K, B) and columns summing to 1.
    """
    if len(alpha) == 1:
        return 1.0
    nats = torch.special.entr(alpha.double()).sum(dim=0)
    return float(nats.mean()) / math.log(len(alpha))


def mean_similarity(models: Sequence[Tensor]) -> float:
    """Compute the mean cosine similarity over pairs of ``models``, at least two."""
    stacked = torch.stack(list(models)).double()
    unit = stacked / stacked.norm(dim=1, keepdim=True)
    number = len(unit)
    every = float((unit @ unit.T).sum()) - number
    return every / (number * (number - 1))


def draw_collapse(
    experiment: Experiment, figure: CollapseSettings, folder: FigureFolder
) -> list[Drawing]:
    """Draw the figure; variants differ only in settings of the method."""
    settings = settings_of(experiment)
    parts = {
        f"{variant}, seed {seed}": (variant, seed)
        for seed in figure.seeds
        for variant in VARIANTS
    }

    def follow(part: str) -> PartRecord:
        variant, seed = parts[part]
        method = Choice(experiment.method.name, VARIANTS[variant](settings))
        run = replace(experiment.run, seed=seed)
        bench = open_workbench(replace(experiment, method=method, run=run))
        return follow_bases(bench).as_record()

    records = folder.finish(parts, follow)
    records_of: RecordsBySeed = {variant: {} for variant in VARIANTS}
    for (variant, seed), record in zip(parts.values(), records, strict=True):
        records_of[variant][seed] = record
    header = ("treated", "similarity", "entropy", "accuracy", "unseen")
    rows = tuple((variant, *_cells(by_seed)) for variant, by_seed in records_of.items())
    ends = {
        variant: {
            str(seed): {name: variant[name] for name in _ENDS}
            for seed, variant in by_seed.items()
        }
        for variant, by_seed in records_of.items()
    }
    return [
        Drawing(
            name="fedbasis-collapse",
            title=TITLE,
            tables=(Table(TITLE, header, rows),),
            header=("treated", "seed", "round", "similarity", "entropy"),
            rows=_rows(records_of),
            figure=_picture(records_of),
            records=records,
            details={"variants": ends},
        )
    ]


def _cells(by_seed: Mapping[int, PartRecord]) -> Iterator[str]:
    records = by_seed.values()
    for name in ("similarity", "entropy"):
        yield estimate(record[name][-1] for record in records).text(scale=1.0, digits=3)
    for name in _ENDS:
        yield estimate(record[name] for record in records).text()


def _rows(records_of: RecordsBySeed) -> Iterator[tuple[object, ...]]:
    for variant, by_seed in records_of.items():
        for seed, record in by_seed.items():
            pairs = zip(record["similarity"], record["entropy"], strict=True)
            for server_round, (similarity, entropy) in enumerate(pairs):
                known = similarity is not None
                entropy_shown = entropy if known else None
                yield variant, seed, server_round, similarity, entropy_shown


@styled
def _picture(records_of: RecordsBySeed) -> Figure:
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    similarity_axes, right = figure.subplots(1, 2)
    lines = zip(records_of.items(), _COLORS, _DASHES, strict=True)
    for (variant, by_seed), color, dashes in lines:
        records = list(by_seed.values())
        known = [value is not None for value in records[0]["similarity"]]
        rounds = [at for at, is_known in enumerate(known) if is_known]
        for axes, name in ((similarity_axes, "similarity"), (right, "entropy")):
            values = [
                estimate(record[name][at] for record in records).mean for at in rounds
            ]
            label = variant if axes is similarity_axes else None
            axes.plot(rounds, values, dashes, color=color.light, label=label)
    similarity_axes.set_ylabel("cosine similarity of the bases")
    right.set_ylabel("entropy of the combinations / log K")
    for axes in (similarity_axes, right):
        axes.set_xlabel("rounds")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
    figure.suptitle("FedBasis, by what is treated")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure
