"""FedBasis' bases and combinations, round by round, with and without its treatments.

fedbasis-pflbed.txt, section 4.2, Figure 2.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from server.sampling import sample_participants
from simulation.figures.folder import PartRecord
from simulation.workbench import Workbench
from strategies.core.basis_models import Bases, BasesState, BasesUpdate
from strategies.core.evaluation import evaluate
from strategies.core.method import Method
from strategies.fedbasis import FedBasisSettings, fedbasis, local_round

Treat = Callable[[FedBasisSettings], FedBasisSettings]


def without_treatments(settings: FedBasisSettings) -> FedBasisSettings:
    """Return the baseline of Eq. 7: all is trained together, from random bases."""
    return replace(
        settings,
        coordinate_descent=False,
        temperature=1.0,
        major_basis=False,
        warm_start_fraction=0.0,
    )


def _descending(settings: FedBasisSettings) -> FedBasisSettings:
    return replace(without_treatments(settings), coordinate_descent=True)


def _sharpened(settings: FedBasisSettings) -> FedBasisSettings:
    return replace(_descending(settings), temperature=settings.temperature)


def _warm(settings: FedBasisSettings) -> FedBasisSettings:
    fraction = settings.warm_start_fraction
    return replace(without_treatments(settings), warm_start_fraction=fraction)


VARIANTS: Mapping[str, Treat] = MappingProxyType(
    {
        "nothing": without_treatments,
        "coordinate descent": _descending,
        "coordinate descent, sharpened": _sharpened,
        "warm start": _warm,
        "all, with a major basis": lambda settings: settings,
    }
)
"""By what is treated. The first three begin with random bases, all alike."""


def follow_bases(bench: Workbench, settings: FedBasisSettings) -> PartRecord:
    """Train as a run of these settings does; return what becomes of the bases.

    Parameters
    ----------
    bench
        The experiment, whatever its method.
    settings
        Of FedBasis.

    Returns
    -------
    Mapping
        ``similarity`` of the bases before the first round and after each, None where
        there are none; ``entropy`` of the combinations before the first round, 1, and
        as the clients of each round learned them; ``accuracy`` and
        ``unseen_accuracy`` of the personalised clients at the end.
    """
    method = fedbasis(bench.task, settings)
    names = sorted(bench.roster.trainable())
    state = method.init(names, bench.key.child("init"))
    similarity, entropy = [_similarity_of(state, bench, settings)], [1.0]
    for server_round in range(1, method.num_rounds + 1):
        entropies: list[float] = []
        updates = _round(bench, settings, state, server_round, entropies)
        state = method.aggregate(state, updates)
        similarity.append(_similarity_of(state, bench, settings))
        known = similarity[-2] is not None
        entropy.append(sum(entropies) / len(entropies) if known else 1.0)
    return {
        "similarity": similarity,
        "entropy": entropy,
        "accuracy": _accuracy(bench, method, state, seen=True),
        "unseen_accuracy": _accuracy(bench, method, state, seen=False),
    }


def _round(
    bench: Workbench,
    settings: FedBasisSettings,
    state: BasesState,
    server_round: int,
    entropies: list[float],
) -> Iterator[tuple[str, BasesUpdate]]:
    """Yield the updates of a round; add the entropy of each client's combination."""
    training, key = bench.task.training, bench.key
    names = sorted(bench.roster.trainable())
    rate = training.learning_rate_at(server_round)
    for name in sample_participants(names, training.participation, server_round, key):
        rng = key.child("client_update", server_round, name)
        data = bench.clients.data(name).train
        payload = Bases(state.models)
        alpha, update = local_round(bench.task, settings, payload, data, rate, rng)
        entropies.append(mean_entropy(alpha))
        yield name, update


def mean_entropy(alpha: Tensor) -> float:
    """Return -Σ_k α_k log α_k / log K, the mean over blocks: 1 is uniform.

    Parameters
    ----------
    alpha
        Shape (K, B), columns summing to 1.
    """
    if len(alpha) == 1:
        return 1.0
    nats = torch.special.entr(alpha.double()).sum(dim=0)
    return float(nats.mean()) / math.log(len(alpha))


def mean_similarity(models: Sequence[Tensor]) -> float:
    """Return the mean cosine similarity of each two of ``models``, at least two."""
    stacked = torch.stack(list(models)).double()
    unit = stacked / stacked.norm(dim=1, keepdim=True)
    number = len(unit)
    every = float((unit @ unit.T).sum()) - number
    return every / (number * (number - 1))


def _similarity_of(
    state: BasesState, bench: Workbench, settings: FedBasisSettings
) -> float | None:
    if len(state.models) < settings.num_models:
        return None
    bases = state.models[settings.num_models - settings.num_bases :]
    parameters = slice(0, bench.task.model.num_parameters)
    return mean_similarity([basis[parameters] for basis in bases])


def _accuracy(
    bench: Workbench, method: Method, state: BasesState, *, seen: bool
) -> float | None:
    """Return the accuracy over all test images of seen or of unseen clients."""
    correct = total = 0
    for member in bench.clients.members():
        if member.seen != seen or member.num_test == 0:
            continue
        rng = bench.key.child("personalize", member.name)
        data = bench.clients.data(member.name)
        predictor = method.personalize(Bases(state.models), None, data, rng)
        found = evaluate(predictor, bench.clients.test(member.name))
        correct, total = correct + found.num_correct, total + found.num_examples
    return correct / total if total else None
