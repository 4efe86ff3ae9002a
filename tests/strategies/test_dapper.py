"""Dapper: by hand, at both ends of λ, the choice of λ, and the way of the sample."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from knnper.data.augmentation import AUGMENTATIONS
from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.experiment import TrainingSettings
from knnper.experiment_file import load_experiment
from knnper.own import CLOSED
from knnper.records import fingerprint, put_together, take_apart
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import site_catalogue
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelState
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import Batch, LocalModel, local_sgd
from knnper.strategies.dapper import (
    Dapper,
    DapperSettings,
    draw_proxy,
    draw_sample,
    extended,
)
from tests.strategies.method_checks import document, refused
from tests.strategies.tiny import (
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    topped,
    white,
)

EVERYTHING = TrainingSettings(
    batch_size=3,
    learning_rate=0.1,
    momentum=0.9,
    weight_decay=0.01,
    num_rounds=1,
    augmentation="crop_flip",
)


def with_proxy(task: Task, proxy: Examples) -> Task:
    return replace(task, proxy=lambda: proxy)


def proxied(training: TrainingSettings = EVERYTHING) -> Task:
    return with_proxy(normed_task(training), noisy(9, 0, seed=2).train)


def white_task(labels: list[int], **training: Any) -> Task:
    """Return a task of one step of rate 1 where the server has these labels."""
    task = linear_task(learning_rate=1.0, num_rounds=1, **training)
    return with_proxy(task, white(labels).train)


def dapper(task: Task, *cover: float, **given: Any) -> Method:
    settings = DapperSettings(cover or (0.0, 0.5, 1.0), **given)
    return Dapper(task, of_name("fedavg", task), settings)


def served(
    method: Method, weights: torch.Tensor, data: ClientData, client: str = UNSEEN_CLIENT
) -> ModelPredictor:
    state = replace(
        method.init(("a",), RandomKey(1)),
        weights=weights,
        rounds_made=method.num_rounds,
    )
    payload = method.broadcast(state, client, RandomKey(5))
    return one_model_of(method, payload, None, data, RandomKey(6))


@pytest.mark.parametrize(
    ("share", "rate", "expected"),
    [(1.0, None, 0.5), (0.0, None, -0.5), (1.0, 0.5, 0.25)],
)
def test_a_step_by_hand(share: float, rate: float | None, expected: float) -> None:
    task = white_task([1] * 7)
    # At 0 the gradient of an example of label 0, the client's, is (-½, ½); that of one
    # of label 1, the server's, is (½, -½).
    method = dapper(task, share, learning_rate=rate)
    predictor = served(method, torch.zeros(2), white([0, 0]))
    assert predictor.weights.tolist() == [expected, -expected]
    assert predictor.describe() == {"client_share": share}


@pytest.mark.parametrize(("factor", "alike"), [(0.001, True), (0.1, False)])
def test_sample_size_is_a_multiple_of_the_clients_examples(
    factor: float, alike: bool
) -> None:
    task = white_task([0, 1] * 50, batch_size=1000)
    method = dapper(task, 0.0, sample_factor=factor)
    predictor = served(method, torch.zeros(2), white([0] * 1000))
    # Of one of the server's examples all that is drawn has its label: a step of ½. Of
    # all 100, half of which have either label, the steps nearly cancel out.
    assert (abs(float(predictor.weights[0])) == pytest.approx(0.5, abs=1e-4)) == alike


def test_lambda_is_the_probability_of_the_clients_own_examples() -> None:
    task = white_task([1] * 50, batch_size=1000)
    predictor = served(dapper(task, 0.25), torch.zeros(2), white([0] * 1000))
    # One step of ½ (fraction of label 0) - ½ (fraction of label 1) = ½ (2 λ - 1); the
    # fraction's standard deviation is 0.014.
    assert float(predictor.weights[0]) == pytest.approx(-0.25, abs=0.06)


def test_all_of_its_own_is_fine_tuning() -> None:
    task = proxied()
    data = noisy(10, 4, seed=1)
    predictor = served(dapper(task, 1.0, num_epochs=2), task.initial_weights, data)
    tuned = topped("fine_tuning", task, num_epochs=2)
    state = tuned.init(("a",), RandomKey(1))
    payload = tuned.broadcast(state, "a", RandomKey(5))
    expected = one_model_of(tuned, payload, None, data, RandomKey(6))
    assert torch.equal(predictor.weights, expected.weights)
    alone = predictor.without_validation().weights
    assert torch.equal(alone, expected.without_validation().weights)


def test_none_of_its_own_is_training_on_the_servers_sample() -> None:
    task = proxied()
    data, rng = noisy(10, 4, seed=1), RandomKey(6)
    sample = draw_sample(task, 1000, RandomKey(5).child("sample"))
    proxy = draw_proxy(sample, task.spec, 14, rng.child("taken"))
    generator = rng.child("proxy").numpy()
    augment = AUGMENTATIONS[EVERYTHING.augmentation]

    def from_the_sample(model: LocalModel) -> torch.Tensor:
        generator.random(3)  # compared with λ, which is 0
        where = torch.from_numpy(generator.integers(0, len(proxy), 3))
        images = augment(proxy.images[where], generator)
        drawn = Batch(Examples(images, proxy.labels[where]), None)
        loss = model.backward(drawn)
        model.step()
        return loss

    as_many, start = noisy(14, 0, seed=40).train, task.initial_weights
    expected = local_sgd(task, start, as_many, 0.1, rng, local_step=from_the_sample)
    predictor = served(dapper(task, 0.0), start, data)
    assert torch.equal(predictor.weights, expected.weights)


@pytest.mark.parametrize(
    ("validation", "expected"), [([0], 1.0), ([1], 0.0), ([0, 1], 0.5), ([], 1.0)]
)
def test_on_validation(validation: list[int], expected: float) -> None:
    task = white_task([1] * 7, batch_size=400)
    data = white([0] * 400, validation)
    predictor = served(dapper(task), torch.zeros(2), data)
    assert predictor.describe() == {"client_share": expected}


def test_of_equals_the_largest() -> None:
    # The server's examples are the client's: every λ trains the same model.
    task = white_task([0] * 7)
    method = dapper(task, 0.0, 0.5, 0.75)
    predictor = served(method, torch.zeros(2), white([0] * 4, [0]))
    assert predictor.describe() == {"client_share": 0.75}


def test_it_travels_after_the_last_round_only() -> None:
    method, key = dapper(proxied(replace(EVERYTHING, num_rounds=2))), RandomKey(7)
    state: Any = method.init(("a",), key)
    for server_round in (1, 2):
        payload = method.broadcast(state, "a", key)
        assert payload.sample is None
        data = noisy(10, 4, seed=1)
        _, update = method.client_update(payload, None, data, server_round, key)
        state = method.aggregate(state, iter([("a", update)]))
    payload = method.broadcast(state, "a", key)
    assert payload.sample.images.shape == (9, 2, 2, 1)
    for record_type, record in (
        (method.state_type, state),
        (method.payload_type, payload),
    ):
        assert type(record) is record_type
        copied = put_together(record_type, take_apart(record))
        assert fingerprint(copied) == fingerprint(record)


def test_no_more_than_is_allowed() -> None:
    task = proxied()
    for most, expected in ((4, 4), (30, 9)):
        method = dapper(task, most_sampled=most)
        state = replace(method.init(("a",), RandomKey(1)), rounds_made=1)
        payload = method.broadcast(state, "a", RandomKey(5))
        assert len(payload.sample.images) == expected


def test_before_it_came_a_client_fine_tunes() -> None:
    task, data = normed_task(EVERYTHING), noisy(10, 4, seed=1)
    method = dapper(task)
    payload = method.broadcast(method.init(("a",), RandomKey(1)), "a", RandomKey(5))
    predictor = method.personalize(payload, None, data, RandomKey(6))
    assert predictor.describe() == {"client_share": 1.0}


def test_a_server_without_examples_is_refused() -> None:
    task = normed_task(EVERYTHING)
    with pytest.raises(RunError, match="the server has none"):
        served(dapper(task), task.initial_weights, noisy(4, 0, seed=1))


def test_a_field_is_not_given_twice() -> None:
    with pytest.raises(ValueError, match="ModelState already has a field 'weights'"):
        extended(ModelState, "Twice", "weights", int)


def test_an_experiment_without_examples_of_the_servers_is_refused() -> None:
    partition = {"name": "iid", "num_clients": 2, "proxy_fraction": 0.1}
    enough = document("fedavg", "dapper", partition=partition)
    load_experiment(enough, experiment_catalogue())
    none = document("fedavg", "dapper")
    refused(none, "partition.proxy_fraction", "found 0 with dapper")


def test_data_that_stays_with_the_sites_is_refused() -> None:
    data = {
        "name": "sites",
        "image_shape": [8, 8, 1],
        "class_names": ["a", "b"],
        "mean": [0.5],
        "std": [0.5],
    }
    sites = document("fedavg", "dapper", data=data, partition={"name": "sites"})
    for catalogue in (experiment_catalogue(), site_catalogue(CLOSED)):
        refused(sites, "personalization.name", "dapper with client_shares", catalogue)
