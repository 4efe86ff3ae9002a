"""Auto: weights by hand, one candidate, who predicts what, and who has no evidence."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.client.served_model import open_served
from knnper.data.examples import ClientData, Examples
from knnper.datastore.examples import Selection
from knnper.experiment_file import load_experiment, to_document
from knnper.settings import Choice
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.auto import (
    CANDIDATES,
    Auto,
    AutoSettings,
    WeightedPredictor,
    default_candidates,
)
from knnper.strategies.core.method import UNSEEN_CLIENT, Method, NoSettings
from knnper.strategies.core.predictors import Predictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.fine_tuning import FineTuningSettings
from tests.client.state.small_site import (
    drawn,
    installed,
    queries,
    simulated,
    site,
    small_model,
)
from tests.strategies.method_checks import document, refused
from tests.strategies.tiny import KEY, linear_task, noisy, normed_task, of_name, white

QUERIES = noisy(5, 0, seed=10).train.images


def auto(task: Task, **settings: Any) -> Auto:
    return Auto(task, of_name("fedavg", task), AutoSettings(**settings))


def served(method: Method, data: ClientData) -> Predictor:
    payload = ModelPayload(method.task.initial_weights)
    return method.personalize(payload, None, data, KEY)


NONE = Choice("none", NoSettings())
TUNED = Choice("fine_tuning", FineTuningSettings(learning_rate=math.log(3)))


@pytest.mark.parametrize(
    ("criterion", "odds"),
    [
        # Of three examples of label 1 on x = 1 each is predicted by what the others
        # taught. From w = 0 the gradient of a mini-batch of them is (½, -½), so one
        # step of log 3 gives p_1 = 1 / (1 + e^-log 3) = ¾. Without it p = (½, ½), of
        # which label 0 is the first: wrong.
        ("log_loss", (3 / 4) ** 3 / (1 / 2) ** 3),
        ("accuracy", math.exp(3)),
        ("both", math.exp(3 + 0.01 * 3 * math.log(1.5))),
    ],
)
def test_weights_by_hand(criterion: str, odds: float) -> None:
    task = linear_task(batch_size=4)
    method = auto(task, candidates=(NONE, TUNED), criterion=criterion)
    predictor = served(method, white([1, 1], [1]))
    share = odds / (1 + odds)
    (row,) = predictor(white([1]).train.images).tolist()
    assert row[1] == pytest.approx((1 - share) / 2 + share * 3 / 4)
    described = predictor.describe()
    assert described["weight_of_fine_tuning"] == pytest.approx(share)
    assert described["weight_of_none"] == pytest.approx(1 - share)
    assert (described["num_left_out"], described["num_held_out"]) == (3, 0)
    if criterion == "log_loss":
        expected = 3 * math.log(0.75)
        assert described["score_of_fine_tuning"] == pytest.approx(expected)


@pytest.mark.parametrize("name", CANDIDATES)
def test_one_candidate_is_that_personalisation(name: str) -> None:
    task, data = normed_task(batch_size=4), noisy(9, 4, seed=1)
    kind = CANDIDATES[name]
    settings = kind.settings_type()
    alone = served(kind(task, of_name("fedavg", task), settings), data)
    predictor = served(auto(task, candidates=(Choice(name, settings),)), data)
    assert torch.equal(predictor(QUERIES), alone(QUERIES))
    assert predictor.describe() == alone.describe()


def test_what_is_mixed_are_the_candidates_themselves() -> None:
    task, data = normed_task(batch_size=4), noisy(2, 0, seed=1)
    method = auto(task)
    mixture = served(method, data)
    assert isinstance(mixture, WeightedPredictor)
    assert len(mixture.predictors) == len(default_candidates())
    for predictor, candidate in zip(mixture.predictors, method.candidates, strict=True):
        assert torch.equal(predictor(QUERIES), served(candidate, data)(QUERIES))


class Scripted:
    """A candidate that predicts one class, and notes what it was fitted on."""

    def __init__(self, label: int, *, undefined: bool = False) -> None:
        self.row = torch.full((3,), math.nan if undefined else 0.0)
        self.row[label] = 1.0
        self.fitted: list[tuple[list[int], list[int]]] = []
        self.asked: list[list[int]] = []

    def personalize(self, _: Any, __: Any, data: ClientData, ___: Any) -> "Scripted":
        self.fitted.append((numbers(data.train), numbers(data.validation)))
        return self

    def __call__(self, images: Tensor) -> Tensor:
        self.asked.append(images[:, 0, 0, 0].tolist())
        return self.row.expand(len(images), -1)

    def describe(self) -> Mapping[str, float]:
        return {}


def numbers(examples: Examples) -> list[int]:
    return [int(pixel) for pixel in examples.images[:, 0, 0, 0]]


def numbered(num_train: int, labels: list[int]) -> ClientData:
    """Return a client whose images are their own numbers, from 0."""
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None]
    both = Examples(images.expand(-1, 2, 2, 1), torch.tensor(labels))
    positions = torch.arange(len(labels))
    return ClientData(
        both.take(positions[:num_train]), both.take(positions[num_train:])
    )


def scripted(*candidates: Any, **settings: Any) -> Auto:
    method = auto(normed_task(), candidates=(NONE,) * len(candidates), **settings)
    method.candidates = list(candidates)
    return method


@pytest.mark.parametrize(
    ("evidence", "min_validation", "scored"),
    [
        ("leave_one_out", 50, range(12)),
        ("validation", 50, range(8, 12)),
        ("auto", 5, range(12)),
        ("auto", 4, range(8, 12)),
    ],
)
def test_what_predicts_an_example_was_fitted_without_it(
    evidence: str, min_validation: int, scored: range
) -> None:
    first, second = Scripted(0), Scripted(1)
    options = {"evidence": evidence, "min_validation": min_validation}
    described = served(
        scripted(first, second, **options), numbered(8, [0, 1, 1] * 4)
    ).describe()
    whole, *folds = first.fitted
    assert whole == (list(range(8)), list(range(8, 12)))
    assert sorted(number for left_out in first.asked for number in left_out) == list(
        scored
    )
    assert len(folds) == min(5, len(scored))
    for (train, validation), left_out in zip(folds, first.asked, strict=True):
        assert train == [number for number in range(8) if number not in left_out]
        assert validation == [
            number for number in range(8, 12) if number not in left_out
        ]
    assert second.fitted == first.fitted
    kind = "num_held_out" if len(scored) == 4 else "num_left_out"
    assert described[kind] == len(scored)


def test_weights_of_less_than_a_hundredth_are_left_out() -> None:
    # Right are 6, 5 and 1 of 12: e^5 = 148 times less than the first.
    labels = [0] * 6 + [1] * 5 + [2]
    candidates = Scripted(0), Scripted(1), Scripted(2)
    mixture = served(scripted(*candidates, criterion="accuracy"), numbered(12, labels))
    assert isinstance(mixture, WeightedPredictor)
    assert mixture.predictors == [*candidates[:2]]
    expected = [math.e / (math.e + 1), 1 / (math.e + 1), 0.0]
    described, names = mixture.describe(), ("none", "none_2", "none_3")
    weights = [described[f"weight_of_{name}"] for name in names]
    assert weights == pytest.approx(expected)
    assert [described[f"score_of_{name}"] for name in names] == [6, 5, 1]
    rows = mixture(torch.zeros(4, 2, 2, 1))
    torch.testing.assert_close(rows, torch.tensor([expected] * 4))


def test_a_candidate_that_diverged_has_no_weight() -> None:
    good, bad = Scripted(1), Scripted(0, undefined=True)
    mixture = served(scripted(bad, good), numbered(6, [0] * 6))
    assert isinstance(mixture, WeightedPredictor)
    assert (mixture.predictors, mixture.weights) == ([good], [1.0])


@pytest.mark.parametrize("num_train", [1, 3])
def test_without_evidence_all_weigh_the_same(num_train: int) -> None:
    method = auto(normed_task(batch_size=4), evidence="validation")
    described = served(method, noisy(num_train, 0, seed=1)).describe()
    weights = [described[f"weight_of_{name}"] for name in method.settings.labels()]
    assert weights == [1 / 4] * 4
    assert described["num_held_out"] == described["num_left_out"] == 0


def test_without_data_it_is_the_global_model() -> None:
    task = normed_task()
    method = auto(task)
    payload = method.broadcast(method.init((), KEY), UNSEEN_CLIENT, KEY)
    predictor = method.personalize(payload, None, noisy(0, 0, seed=1), KEY)
    expected = task.probabilities(payload.weights, QUERIES)
    assert torch.equal(predictor(QUERIES), expected)


def test_candidates_are_written_as_personalizations_are() -> None:
    tuned = {"name": "fine_tuning", "num_epochs": 3}
    section = {"name": "auto", "candidates": ["none", tuned]}
    known = experiment_catalogue()
    experiment = load_experiment(document("fedavg", section), known)
    settings = experiment.personalization.settings
    assert isinstance(settings, AutoSettings)
    assert settings.candidates == (
        NONE,
        Choice("fine_tuning", FineTuningSettings(num_epochs=3)),
    )
    assert load_experiment(to_document(experiment), known) == experiment
    short = load_experiment(document("fedavg", "auto"), known)
    assert load_experiment(to_document(short), known) == short


@pytest.mark.parametrize(
    ("candidate", "hint"),
    [
        ("kn", "unknown name .kn.; did you mean 'knn'"),
        ({"name": "knn", "num_neighbours": 3}, "did you mean 'num_neighbors'"),
        ({"name": "fine_tuning", "num_epochs": 0}, "expected a number of at least 1"),
        ("dapper", "unknown name .dapper."),
    ],
)
def test_wrong_candidates_are_refused(candidate: Any, hint: str) -> None:
    section = {"name": "auto", "candidates": ["none", candidate]}
    refused(document("fedavg", section), "personalization.candidates.1", hint)


def test_sites_serve_the_first_memory_of_the_candidates() -> None:
    assert small_model(method="fedavg", name="auto").card.memory.class_prior.strengths
    candidates = ["none", {"name": "knn_fine_tuned", "memory": {"num_neighbors": 3}}]
    model = small_model(method="fedavg", name="auto", candidates=candidates)
    assert model.card.memory.num_neighbors == 3


def test_a_site_adds_to_that_memory_and_deletes_from_it(tmp_path: Path) -> None:
    model, data = small_model(method="fedavg", name="auto"), site(30, 20)
    arrived = drawn("arrived", 2).examples
    with open_served(installed(tmp_path, model, data)) as opened:
        expected = simulated(model, data)(queries())
        assert torch.equal(opened.predict(queries()).probabilities, expected)
        opened.add(arrived.images, arrived.labels, ["arrived/x", None])
        opened.delete(Selection(external_ids=("train/3.png",)))
        assert len(opened.store) == 51
