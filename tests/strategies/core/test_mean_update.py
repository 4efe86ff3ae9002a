"""The mean of a round as one update, for every method of the catalogue."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from knnper.experiment_file import load_experiment
from knnper.records import fingerprint, take_apart, tensors_of
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.assembly import assemble_with_task
from knnper.strategies.core.compression import Compressed
from knnper.strategies.core.mean_update import differences, synthetic_update
from knnper.strategies.core.method import Method
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fedavgm import FedAvgM
from tests.strategies.method_checks import document
from tests.strategies.test_contract import CLIENTS, TRAINING, build, trained
from tests.strategies.test_contract import client_update as update_of
from tests.strategies.tiny import linear_task, noisy, plain_task, task_for

# Why each of these is no mean of equal updates from one payload.
NOT_A_MEAN = {
    "agnostic": "a client's weight depends on its group's factor",
    "bulyan": "compares clients",
    "clustered_fl": "compares clients",
    "fedas": "weighs by Fisher information",
    "fedattn": "keeps a representation of each client",
    "fedbasis": "clusters clients",
    "fedmedian": "compares clients",
    "fedpac": "compares clients",
    "fedproto": "weighs each row by the client's count of its label",
    "fedtrimmedavg": "compares clients",
    "heterofl": "clients have models of different widths",
    "hypcluster": "each cluster has a mean of its own",
    "krum": "compares clients",
    "local": "has no rounds",
    "multikrum": "compares clients",
    "pfedfda": "a noisy covariance need not be one",
    "pfedhn": "keeps an embedding of each client",
    "qfedavg": "weighs by loss",
    "scaffold": "counts the replies",
}


def test_only_methods_that_take_a_mean_say_so() -> None:
    assert not [name for name in NOT_A_MEAN if METHODS[name].takes_mean]


def test_own_aggregation_is_no_mean_unless_stated() -> None:
    class Other(FedAvg):
        def aggregate(self, state: Any, updates: Any) -> Any:
            return state

    class Stated(Other):
        takes_mean = True

    class Heir(FedAvgM):
        pass

    kinds: list[type[Method]] = [FedAvg, Other, Stated, Heir]
    assert [kind.takes_mean for kind in kinds] == [True, False, True, True]


@pytest.mark.parametrize(
    "name", sorted(name for name, kind in METHODS.items() if kind.takes_mean)
)
def test_mean_of_a_round_stands_for_the_round(name: str) -> None:
    method, before = trained(name).method, trained(name).before
    key = RandomKey(4)
    payloads = [method.broadcast(before, client, key.child(client)) for client in "ab"]
    assert len({fingerprint(payload) for payload in payloads}) == 1
    updates = [replace(update, num_examples=1) for _, update in trained(name).updates]
    changes = torch.stack(
        [differences(method, payloads[0], update) for update in updates]
    )
    assert changes.dtype == torch.float32
    assert bool((changes != 0).any(dim=1).all())
    of_mean = synthetic_update(method, payloads[0], updates[1], changes.mean(dim=0))
    assert of_mean.num_examples == 1
    assert math.isnan(of_mean.train_loss)
    assert type(of_mean) is method.update_type
    plain = method.aggregate(before, iter(zip(CLIENTS, updates, strict=True)))
    private = method.aggregate(before, iter([("", of_mean)]))
    plain_parts, parts = take_apart(plain), take_apart(private)
    assert parts.structure == plain_parts.structure
    for path, tensor in plain_parts.tensors.items():
        torch.testing.assert_close(parts.tensors[path], tensor, rtol=1e-4, atol=1e-5)


def test_differences_follow_the_order_of_the_paths() -> None:
    method = FedAvg(linear_task(TRAINING), FedAvg.settings_type())
    payload = ModelPayload(torch.tensor([1.0, -2.0]))
    update = ModelUpdate(torch.tensor([1.5, -4.0]), 3, 0.5)
    assert differences(method, payload, update).tolist() == [0.5, -2.0]
    moved = synthetic_update(method, payload, update, torch.tensor([1.0, 1.0]))
    assert moved.weights.tolist() == [2.0, -1.0]
    with pytest.raises(RuntimeError, match=r"\[2\].* size 3"):
        synthetic_update(method, payload, update, torch.zeros(3))


class Doubled(UpdateProcessor):
    """Doubles an update at the client, and halves it at the server."""

    def process(self, payload: Any, update: Any, rng: RandomKey) -> Any:
        return replace(update, weights=update.weights * 2)

    def decoded(self, payload: Any, update: Any) -> Any:
        halved = replace(update, weights=update.weights / 2)
        return super().decoded(payload, halved)


def test_processors_nest() -> None:
    """Each undoes at the server what it did at the client, the last one first."""
    method = build(FedAvg, task_for("fedavg", TRAINING))
    data, state = noisy(6, 0, seed=1), method.init(CLIENTS, RandomKey(1))
    _, plain = update_of(method, state, "a", data)
    doubled = Doubled(method.task, method, method.settings)
    twice = Doubled(method.task, doubled, method.settings)
    _, sent = update_of(twice, state, "a", data)
    assert torch.equal(sent.weights, plain.weights * 4)
    payload = twice.broadcast(state, "a", RandomKey(1))
    assert fingerprint(twice.decoded(payload, sent)) == fingerprint(plain)


def test_protection_acts_before_compression() -> None:
    asked = document(training={"compression": {"name": "sign"}})
    experiment = load_experiment(asked, experiment_catalogue())
    protected: list[Doubled] = []

    def protect(method: Method) -> Method:
        protected.append(Doubled(method.task, method, method.settings))
        return protected[0]

    method = assemble_with_task(experiment, plain_task(TRAINING), protect).method
    assert isinstance(method, Compressed)
    assert method.method is protected[0]
    data, state = noisy(6, 0, seed=1), method.init(CLIENTS, RandomKey(1))
    _, plain = update_of(protected[0].method, state, "a", data)
    payload = method.broadcast(state, "a", RandomKey(1))
    _, sent = update_of(method, state, "a", data)
    arrived = method.decoded(payload, sent)
    assert set(tensors_of(arrived)) == {"weights"}
    # The client compressed twice the weights; decoding halves what it sent.
    change = plain.weights * 2 - payload.weights
    expected = change.sign() * change.abs().mean()
    assert torch.allclose(arrived.weights * 2 - payload.weights, expected, atol=1e-6)
