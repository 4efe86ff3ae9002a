"""Membership inference: which of some labelled examples are in the data.

All attackers know the examples with their labels, and the global model, which every
client has. A higher score suggests a member.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.client.service.documents import InputPrediction
from knnper.data.examples import Examples
from knnper.datastore.prediction import KERNELS, Apply, KernelName
from knnper.seeding import RandomKey
from knnper.simulation.audit.figures import (
    AttackResult,
    Scores,
    membership_result,
)

LIRA = "lira"
MEMORY_ATTACKS = ("labels", "probabilities", "neighbors", "waka")
_AT_ONCE = 64  # inputs of a query
_NUM_SUBSETS = 32  # random memories that the attack WaKA compares with
_SMALLEST = 1e-12  # of a probability or a sum of weights


def confidence_logits(probabilities: Tensor, labels: Tensor) -> Scores:
    """Return log(p_y / (1 - p_y)) of probabilities (n, c), float64 of shape (n,).

    Carlini et al. 2022, section IV-C: this scale is nearly Gaussian over models.
    """
    rows, column = probabilities.double(), labels[:, None]
    # The sum of the others, since 1 - p_y rounds to 0 for confident models.
    others = rows.scatter(1, column, 0.0).sum(dim=1)
    true = rows.gather(1, column)[:, 0]
    return np.asarray(
        true.clamp_min(_SMALLEST).log() - others.clamp_min(_SMALLEST).log()
    )


def lira_scores(
    logits: Scores, shadow_logits: Scores, is_out: NDArray[np.bool_]
) -> Scores:
    """Score n examples by LiRA's offline variant with a fixed variance.

    Carlini et al. 2022, "Membership Inference Attacks From First Principles", Eq. 4:
    the probability that a model without the example is less confident than the target.
    With few shadow models one variance is used for all examples (section VI-A), so the
    score is the distance from the mean.

    Parameters
    ----------
    logits, shadow_logits
        `confidence_logits` of the target (n,), and of k shadow models (k, n).
    is_out
        Whether a shadow model was trained without an example, shape (k, n); at least
        one model of each example.
    """
    sums = np.where(is_out, shadow_logits, 0.0).sum(axis=0)
    return np.asarray(logits - sums / is_out.sum(axis=0))


@dataclass(frozen=True)
class Memory:
    """A memory as an attacker meets it.

    Attributes
    ----------
    ask
        Queries the memory with inputs (n, ...).
    embed, head
        The global model.
    knn_weight, num_neighbors, kernel, kernel_scale, num_stored
        λ, k, the kernel, σ and the number of stored examples.
    """

    ask: Callable[[Tensor], list[InputPrediction]]
    embed: Apply
    head: Apply
    knn_weight: float
    num_neighbors: int
    kernel: KernelName
    kernel_scale: float
    num_stored: int

    def attack(self, examples: Examples, rng: RandomKey) -> Mapping[str, Scores]:
        """Query all examples; return the scores of each possible attack, (n,)."""
        # In random order, since private answers change as budgets are spent.
        order = torch.from_numpy(rng.child("order").numpy().permutation(len(examples)))
        answered = list[InputPrediction]()
        for inputs in torch.split(examples.images[order], _AT_ONCE):
            answered.extend(self.ask(inputs))
        answers = [answered[place] for place in order.argsort().tolist()]
        embeddings = self.embed(examples.images)
        p_global = self.head(embeddings).gather(1, examples.labels[:, None])[:, 0]
        labels: list[int] = examples.labels.tolist()
        rows = list(zip(answers, labels, p_global.tolist(), strict=True))
        scores = {
            "labels": [(answer.label == y) - p for answer, y, p in rows],
        }
        if all(answer.probabilities for answer in answers):
            # The memory's part of the label's probability, λ p_kNN.
            scores["probabilities"] = [
                _of_label(answer.probabilities, y, 0.0)
                - (1 - self.knn_weight) * _of_label(answer.adapted_probabilities, y, p)
                for answer, y, p in rows
            ]
        if all(answer.neighbors for answer in answers):
            scores["neighbors"] = [
                -min(near.distance for near in answer.neighbors or ())
                for answer in answers
            ]
        arrays = {name: np.array(values, float) for name, values in scores.items()}
        if (votes := arrays.get("probabilities")) is not None:
            arrays["waka"] = self.waka_scores(votes, embeddings, examples.labels, rng)
        return arrays

    def waka_scores(
        self, votes: Scores, embeddings: Tensor, labels: Tensor, rng: RandomKey
    ) -> Scores:
        """Score n examples by how much better a memory with them explains the answer.

        In the style of WaKA (Mesana et al., arXiv 2411.01357): the difference of the
        1-Wasserstein distances of the observed ``votes``, λ p_kNN of the label, to
        their distributions over random memories without and with the example.
        Departures: random halves of the n examples in place of all subsets, and the
        kernel's vote in place of a count.
        """
        count = len(labels)
        squared = torch.cdist(embeddings, embeddings).double() ** 2
        kernel, dim = KERNELS[self.kernel], embeddings.shape[1]
        weights = kernel(squared, self.kernel_scale, dim).exp().fill_diagonal_(0.0)
        is_own_label = labels[None] == labels[:, None]
        size = min(self.num_stored, max(1, count // 2))
        generator, difference = rng.numpy(), np.zeros(count)
        for _ in range(_NUM_SUBSETS):
            chosen = torch.zeros(count, dtype=torch.float64)
            chosen[torch.from_numpy(generator.permutation(count)[:size])] = 1.0
            nearest = (weights * chosen).topk(min(self.num_neighbors, count), dim=1)
            of_label = nearest.values * is_own_label.gather(1, nearest.indices)
            without = of_label.sum(1) / nearest.values.sum(1).clamp_min(_SMALLEST)
            # The example itself weighs exp(0), and the last of the others drops out.
            with_it = (1 + of_label[:, :-1].sum(1)) / (
                1 + nearest.values[:, :-1].sum(1)
            )
            difference += np.abs(votes - self.knn_weight * without.numpy())
            difference -= np.abs(votes - self.knn_weight * with_it.numpy())
        return difference / _NUM_SUBSETS


def memory_results(
    attacks: Sequence[str],
    surface: str,
    outcomes: Sequence[tuple[Mapping[str, Scores], NDArray[np.bool_]]],
    reason: str,
) -> Iterator[AttackResult]:
    """Yield the figures of attacks on memories together.

    Parameters
    ----------
    outcomes
        Of each memory: the scores by attack, and which examples are members.
    reason
        Why an attack has no scores.
    """
    for attack in attacks:
        possible = [outcome for outcome in outcomes if attack in outcome[0]]
        if possible:
            scores = np.concatenate([by_attack[attack] for by_attack, _ in possible])
            is_member = np.concatenate([members for _, members in possible])
            yield membership_result(attack, surface, scores, is_member)
        else:
            yield AttackResult(attack, surface, left_out=reason)


def sampled(
    members: Examples, others: Examples, share: float, rng: RandomKey
) -> tuple[Examples, NDArray[np.bool_]]:
    """Sample a share of both, at least one of each; return which are members, (n,)."""
    generator, parts = rng.numpy(), []
    for examples in (members, others):
        order = generator.permutation(len(examples))
        chosen = order[: max(1, round(share * len(examples)))]
        parts.append(examples.take(torch.from_numpy(chosen)))
    joined = parts[0].join(parts[1])
    return joined, np.arange(len(joined)) < len(parts[0])


def _of_label(by_class: dict[str, float] | None, label: int, default: float) -> float:
    return default if by_class is None else list(by_class.values())[label]
