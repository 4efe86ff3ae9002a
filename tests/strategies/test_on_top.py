"""Whatever can be put on top of a method works on top of every method."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from knnper.data.examples import ClientData
from knnper.datastore.memory import KnnSettings
from knnper.experiment import TrainingSettings
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS, PERSONALIZERS, title_of
from knnper.strategies.core.method import AS_IT_IS, UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings
from knnper.strategies.knn_per import KnnMemory, knn_predictor
from knnper.strategies.local import Local, LocalSettings
from tests.strategies.method_checks import document, refused
from tests.strategies.tiny import noisy, normed_task, of_name, run_rounds, task_for

pytestmark = pytest.mark.integration

TRAINING = TrainingSettings(num_rounds=1, batch_size=4, learning_rate=0.1)
BARE = [name for name, spec in METHODS.items() if spec.personalization == AS_IT_IS]
ON_TOP = [name for name in PERSONALIZERS if name != AS_IT_IS]
MODEL_ONLY = [name for name in ON_TOP if PERSONALIZERS[name].needs_one_model]


def trained(task: Task, name: str) -> tuple[Method, Any, Any]:
    """Return a method, and its own and client a's state after one round."""
    method = METHODS[name](task, METHODS[name].settings_type())
    return method, *after_a_round(method)


def after_a_round(method: Method) -> tuple[Any, Any]:
    """Return the server's and client a's state after a round with three clients."""
    clients = {name: noisy(9, 3, seed=seed) for seed, name in enumerate("abc", start=1)}
    state, memory = run_rounds(method, clients, method.num_rounds)
    return state, memory.get("a")


def allowed(name: str, on_top: str) -> bool:
    return METHODS[name].serves_one_model or on_top not in MODEL_ONLY


def served(
    method: Method, state: Any, memory: Any, client: str, data: ClientData
) -> Any:
    payload = method.broadcast(state, client, RandomKey(3))
    return method.personalize(payload, memory, data, RandomKey(4))


@pytest.mark.parametrize("name", BARE)
def test_all_that_can_be_on_top_serves_probabilities(name: str) -> None:
    task = replace(task_for(name, TRAINING), proxy=lambda: noisy(7, 0, seed=2).train)
    method, bare_state, memory = trained(task, name)
    queries = noisy(5, 0, seed=10).train.images
    allowed_on_top = [on_top for on_top in ON_TOP if allowed(name, on_top)]
    assert allowed_on_top
    for on_top in allowed_on_top:
        entry = PERSONALIZERS[on_top]
        topped = entry(task, method, entry.settings_type())
        state = bare_state
        if topped.state_type is not method.state_type:
            state, _ = after_a_round(topped)
        for client, sizes in (
            (UNSEEN_CLIENT, (0, 0)),
            (UNSEEN_CLIENT, (1, 0)),
            ("a", (4, 2)),
        ):
            its_state = memory if client == "a" else None
            data = noisy(*sizes, seed=1)
            predictor = served(topped, state, its_state, client, data)
            rows = predictor(queries)
            assert rows.shape == (5, 3), on_top
            assert rows.dtype == torch.float32
            torch.testing.assert_close(rows.sum(dim=1), torch.ones(5))
            described = predictor.describe()
            assert all(isinstance(value, float) for value in described.values())


@pytest.mark.parametrize("name", BARE)
def test_a_memory_without_weight_is_the_method(name: str) -> None:
    task = task_for(name, TRAINING)
    method, state, memory = trained(task, name)
    topped = KnnMemory(task, method, KnnSettings(knn_weights=(0.0,)))
    queries, data = noisy(5, 0, seed=10).train.images, noisy(9, 3, seed=1)
    for client, its_state in (("a", memory), (UNSEEN_CLIENT, None)):
        expected = served(method, state, its_state, client, data)
        topped_probabilities = served(topped, state, its_state, client, data)
        assert torch.equal(topped_probabilities(queries), expected(queries))
        assert topped_probabilities.describe().items() >= expected.describe().items()


@pytest.mark.parametrize("on_top", MODEL_ONLY)
@pytest.mark.parametrize(
    "name", [name for name in BARE if not METHODS[name].serves_one_model]
)
def test_what_a_method_cannot_bear_is_refused(name: str, on_top: str) -> None:
    partition = {"name": "iid", "num_clients": 2, "proxy_fraction": 0.1}
    topped = document(name, on_top, partition=partition)
    refused(topped, "personalization.name", "one set of weights")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BARE])
def test_a_name_for_a_combination_takes_nothing_else(name: str) -> None:
    hint = f"with {name}, which always has"
    refused(document(name, {"name": AS_IT_IS}), "personalization.name", hint)


def test_a_section_without_a_name_is_of_the_methods_own_kind() -> None:
    known = experiment_catalogue()
    unnamed = load_experiment(document("knn_per", {"num_neighbors": 3}), known)
    named = document("fedavg", {"name": "knn", "num_neighbors": 3})
    assert unnamed.personalization == load_experiment(named, known).personalization


def test_a_name_alone_may_stand_for_the_section() -> None:
    known = experiment_catalogue()
    short = load_experiment(document("fedem", "knn"), known)
    long = load_experiment(document("fedem", {"name": "knn"}), known)
    assert short == long
    refused(document("fedem", "kn"), "personalization.name", "unknown name .kn.")


class TestWhatSawTheValidationSplit:
    """A memory on a model that was trained on both splits."""

    def base(self, task: Task, name: str) -> Method:
        if name == "local":
            return Local(task, LocalSettings(num_rounds=30))
        tuning = FineTuningSettings(num_epochs=30, learning_rate=0.5)
        return FineTuning(task, of_name("fedavg", task), tuning)

    @pytest.mark.parametrize(("name", "seed"), [("fine_tuned", 2), ("local", 1)])
    def test_lambda_is_chosen_without_it(self, name: str, seed: int) -> None:
        task, data = normed_task(TRAINING), noisy(9, 8, seed=seed)
        settings = KnnSettings()
        method = KnnMemory(task, self.base(task, name), settings)
        state = method.init(("a",), RandomKey(1))
        predictor = served(method, state, None, "a", data)
        base = predictor.embed.__self__
        assert isinstance(base, ModelPredictor)
        alone = base.without_validation()
        assert not torch.equal(alone.weights, base.weights)
        expected = knn_predictor(alone, 3, data, settings, RandomKey(4))
        assert predictor.knn_weight == expected.knn_weight
        assert predictor.describe()["num_stored"] == 17
        assert alone.without_validation() is alone
        # With the model that has seen the split, the choice would be another.
        leaking = knn_predictor(
            replace(base, trained_alone=None), 3, data, settings, RandomKey(4)
        )
        assert predictor.knn_weight != leaking.knn_weight


def test_titles_say_what_is_on_top() -> None:
    titles = {("fedavg", "none"): "FedAvg", ("knn_per", "knn"): "kNN-Per"}
    titles |= {("fedem", "knn"): "FedEM + kNN", ("lost", "found"): "lost + found"}
    assert {pair: title_of(*pair) for pair in titles} == titles
