import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.client.service.documents import InputPrediction, NeighborDocument
from knnper.data.examples import Examples
from knnper.seeding import RandomKey
from knnper.simulation.audit.figures import area_under_curve
from knnper.simulation.audit.membership import (
    Memory,
    confidence_logits,
    lira_scores,
)


def test_confidence_logits_by_hand_and_without_overflow() -> None:
    probabilities = torch.tensor([[0.8, 0.1, 0.1], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    logits = confidence_logits(probabilities, torch.tensor([0, 0, 1]))
    assert logits[0] == pytest.approx(np.log(0.8 / 0.2), rel=1e-5)
    assert logits[1] == pytest.approx(np.log(1e12))
    assert logits[2] == pytest.approx(-np.log(1e12))


def test_lira_compares_with_shadows_that_lack_the_example() -> None:
    shadow_logits = np.array([[1.0, 9.0], [3.0, 5.0]])
    is_out = np.array([[True, False], [True, True]])
    scores = lira_scores(np.array([4.0, 4.0]), shadow_logits, is_out)
    assert scores.tolist() == [4 - 2, 4 - 5]


def answer(label: int, **shown: object) -> InputPrediction:
    return InputPrediction(label=label, class_name=str(label), **shown)  # type: ignore[arg-type]


def memory_that_answers(*answers: InputPrediction) -> Memory:
    """Return a memory with λ = 0.4; p_global is 0.5 for both classes."""
    return Memory(
        ask=lambda inputs: [answers[int(row)] for row in inputs.flatten()],
        embed=lambda images: images.reshape(len(images), -1).float(),
        head=lambda embeddings: torch.full((len(embeddings), 2), 0.5),
        knn_weight=0.4,
        num_neighbors=1,
        kernel="paper",
        kernel_scale=1.0,
        num_stored=1,
    )


EXAMPLES = Examples(torch.arange(2.0).reshape(2, 1, 1, 1), torch.tensor([1, 0]))


def test_memory_scores_by_hand() -> None:
    near = NeighborDocument(
        id=1, name=None, label=1, class_name="1", distance=0.0, weight=1.0
    )
    far = near.model_copy(update={"distance": 2.0})
    memory = memory_that_answers(
        answer(1, probabilities={"0": 0.3, "1": 0.7}, neighbors=[near]),
        answer(
            1,
            probabilities={"0": 0.3, "1": 0.7},
            neighbors=[far],
            adapted_probabilities={"0": 0.25, "1": 0.75},
        ),
    )
    scores = memory.attack(EXAMPLES, RandomKey(0))
    assert scores["labels"] == pytest.approx([1 - 0.5, 0 - 0.5])
    assert scores["probabilities"] == pytest.approx([0.7 - 0.6 * 0.5, 0.3 - 0.6 * 0.25])
    assert scores["neighbors"] == pytest.approx([0, -2])
    assert set(scores) == {"labels", "probabilities", "neighbors", "waka"}


def test_attacks_need_what_an_answer_shows() -> None:
    memory = memory_that_answers(answer(1), answer(0))
    scores = memory.attack(EXAMPLES, RandomKey(0))
    assert set(scores) == {"labels"}


def waka_area(embeddings: Tensor, labels: Tensor, is_stored: Tensor) -> float:
    """Attack a memory of the examples that are stored, with k = 3 and λ = 0.5."""
    stored, stored_labels = embeddings[is_stored], labels[is_stored]
    nearest = (-torch.cdist(embeddings, stored).double()).exp().topk(3, dim=1)
    own = stored_labels[nearest.indices] == labels[:, None]
    share = (nearest.values * own).sum(dim=1) / nearest.values.sum(dim=1)
    memory = memory_that_answers()
    memory = Memory(
        **{
            **vars(memory),
            "knn_weight": 0.5,
            "num_neighbors": 3,
            "num_stored": len(stored),
        }
    )
    scores = memory.waka_scores(
        np.asarray(0.5 * share), embeddings, labels, RandomKey(0)
    )
    rows = is_stored.numpy()
    return area_under_curve(scores[rows], scores[~rows]).value


def test_waka_tells_stored_examples_from_others() -> None:
    generator = RandomKey(3, ("waka",)).numpy()
    embeddings = torch.from_numpy(generator.normal(size=(120, 4)).astype(np.float32))
    rows = torch.arange(120)
    assert waka_area(embeddings, rows % 4, rows // 4 % 2 == 0) > 0.8
