"""HeteroFL's slices, averages and identities."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from knnper.data.examples import InputSpec
from knnper.datastore.memory import KnnSettings
from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError
from knnper.experiment import DeviceSettings, TrainingSettings
from knnper.experiment_file import load_experiment
from knnper.flat_model import FlatModel
from knnper.models import build_model, can_be_narrower, narrower
from knnper.networks import LeafCnnSettings, TinyCnnSettings
from knnper.seeding import RandomKey
from knnper.server.fleet import Devices
from knnper.settings import Choice
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.assembly import task_of_experiment
from knnper.strategies.core.compression import COMPRESSORS, Compressed
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings
from knnper.strategies.heterofl import HeteroFL, HeteroFLSettings, SubModel, places_in
from knnper.strategies.knn_per import KnnMemory
from tests.strategies.method_checks import document, problems_of, refused
from tests.strategies.tiny import (
    KEY,
    ONE_PIXEL,
    linear_task,
    noisy,
    normed_task,
    of_name,
    plain_task,
    run_rounds,
    task_of,
)

EVERYTHING = TrainingSettings(
    num_rounds=3, batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01
)
HALF = {"client_widths": {"half": 0.5, "whole": 1.0, "other": 0.5}}


class TwoHidden(EmbeddingModel):
    """One pixel, two hidden units without activation, two labels; no head's bias."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = max(1, round(2 * width)), 2
        self.hidden = nn.Linear(1, self.embedding_dim)
        self.classifier = nn.Linear(self.embedding_dim, 2, bias=False)

    def embed(self, x: Tensor) -> Tensor:
        embeddings: Tensor = self.hidden(x.flatten(start_dim=1))
        return embeddings


def two_hidden(*weights: float, **training: Any) -> Task:
    """Return its task: hidden weights (2), biases (2), then the head's rows (2 x 2)."""
    initial = torch.tensor(weights or range(8), dtype=torch.float32)
    task = task_of(TwoHidden, ONE_PIXEL, TrainingSettings(**training), initial)
    return replace(task, narrower=lambda ratio: FlatModel(TwoHidden(ratio)))


def method_of(task: Task, **settings: Any) -> HeteroFL:
    return HeteroFL(task, HeteroFLSettings(**settings))


def halves(**settings: Any) -> HeteroFL:
    return method_of(two_hidden(), **HALF, **settings)


def start(method: HeteroFL) -> ModelState:
    return ModelState(method.task.initial_weights)


def update(*weights: float, num_examples: int = 1) -> ModelUpdate:
    return ModelUpdate(torch.tensor(weights, dtype=torch.float32), num_examples, 0.5)


def test_a_client_is_sent_the_first_channels_by_hand() -> None:
    method = halves()
    state = method.init(["half", "whole"], KEY)
    sent = method.broadcast(state, "half", KEY)
    # The first unit's weight and bias, and of each row of the head the first number.
    assert sent.weights.tolist() == [0, 2, 4, 6]
    assert sent.width == 0.5
    assert method.broadcast(state, "whole", KEY).weights.tolist() == [*range(8)]
    assert method.broadcast(state, UNSEEN_CLIENT, KEY).width == 1


def test_mean_over_the_holders_of_a_weight_by_hand() -> None:
    method = halves()
    before = ModelState(torch.arange(8.0))
    half, whole = update(10, 20, 30, 40), update(*[2.0] * 8, num_examples=9)
    after = method.aggregate(before, [("half", half), ("whole", whole)])
    assert after.weights.tolist() == [6, 2, 11, 2, 16, 2, 21, 2]
    # What nobody holds stays as it was.
    alone = method.aggregate(before, [("half", half), ("other", update(0, 0, 0, 0))])
    assert alone.weights.tolist() == [5, 1, 10, 3, 15, 5, 20, 7]


def test_examples_may_count_by_hand() -> None:
    method = halves(client_weights="size")
    half = update(10, 20, 30, 40, num_examples=1)
    whole = update(*[2.0] * 8, num_examples=3)
    before = ModelState(torch.zeros(8))
    after = method.aggregate(before, [("half", half), ("whole", whole)])
    assert after.weights.tolist() == [4, 2, 6.5, 2, 9, 2, 11.5, 2]


def test_hidden_outputs_are_divided_by_the_width_by_hand() -> None:
    task = two_hidden(3, 5, 1, 1, 2, 7, 4, 9)
    # z = (3 x + 1) / 0.5 = 8 for a white pixel, and logits (2 z, 4 z).
    for scaler, z in ((True, 8.0), (False, 4.0)):
        method = method_of(task, scaler=scaler, **HALF)
        payload = method.broadcast(start(method), "half", KEY)
        served = method.personalize(payload, None, noisy(0, 0, 1), KEY)
        white = torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)
        assert served.embed(white).tolist() == [[z]]
        expected = torch.softmax(torch.tensor([[2 * z, 4 * z]]), dim=1)
        torch.testing.assert_close(served(white), expected)


def test_places_of_convolutions_and_of_what_is_behind_them() -> None:
    """The same numbers by name, whatever the layout of the flat vectors."""
    spec = InputSpec((8, 8, 3), 5, mean=(0.5,) * 3, std=(0.3,) * 3)
    choice = Choice("leaf_cnn", LeafCnnSettings(embedding_dim=10))
    whole = build_model(choice, spec, RandomKey(0))
    part = build_model(narrower(choice, 0.3), spec, RandomKey(1))
    weights = torch.randn(whole.num_weights)
    tensors = part.named(weights[places_in(whole, part)])
    expected = whole.named(weights)
    assert tensors["features.0.weight"].shape == (10, 3, 5, 5)
    assert tensors["features.3.weight"].shape == (20, 10, 5, 5)
    assert tensors["features.7.weight"].shape == (3, 20 * 4)
    assert tensors["classifier.weight"].shape == (5, 3)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name][tuple(map(slice, tensor.shape))])


def test_a_sub_model_is_the_whole_one_whose_other_channels_are_silent() -> None:
    """Without scaler: what the first channels compute, they compute alone as well."""
    method = method_of(plain_task(), scaler=False, client_widths={"a": 0.5})
    weights = torch.randn(method.task.model.num_weights)
    payload = method.broadcast(ModelState(weights), "a", KEY)
    part = method._part(0.5)
    silent = torch.zeros(len(weights))
    silent[part.places] = payload.weights
    images = noisy(6, 0, seed=1).train.images
    logits = part.task.logits(payload.weights, images)
    expected = method.task.logits(silent, images)
    torch.testing.assert_close(logits, expected)


def rounds_of(method: Any) -> ModelState:
    clients = {client: noisy(5 + i, 2, seed=i) for i, client in enumerate("abc")}
    state: ModelState = run_rounds(method, clients, EVERYTHING.num_rounds)[0]
    return state


def test_with_whole_widths_and_weights_by_size_it_is_fedavg() -> None:
    plain = rounds_of(of_name("fedavg", plain_task(EVERYTHING)))
    state = rounds_of(
        method_of(plain_task(EVERYTHING), widths=(1.0,), client_weights="size")
    )
    assert torch.equal(state.weights, plain.weights)
    # BatchNorm is no obstacle then.
    plain = rounds_of(of_name("fedavg", normed_task(EVERYTHING)))
    whole = method_of(normed_task(EVERYTHING), widths=(1.0,), client_weights="size")
    assert torch.equal(rounds_of(whole).weights, plain.weights)
    equal = method_of(normed_task(EVERYTHING), widths=(1.0,))
    assert not torch.equal(rounds_of(equal).weights, plain.weights)


def test_with_one_width_for_all_it_is_fedavg_of_the_narrow_network() -> None:
    """What is outside of everybody's part stays as it was in the beginning."""
    task = plain_task(EVERYTHING)
    settings: dict[str, Any] = {"scaler": False, "client_weights": "size"}
    method = method_of(task, widths=(0.5,), **settings)
    part = method._part(0.5)
    narrow = of_name("fedavg", part.task)
    expected = task.initial_weights.clone()
    expected[part.places] = rounds_of(narrow).weights
    assert torch.equal(rounds_of(method).weights, expected)


def test_a_client_trains_the_small_network_itself() -> None:
    method = method_of(plain_task(EVERYTHING), client_widths={"a": 0.25})
    payload = method.broadcast(start(method), "a", KEY)
    data, loads = noisy(6, 0, seed=1), list[int]()
    whole = method.task.model
    whole.load = lambda weights: loads.append(1)  # type: ignore[method-assign]
    _, sent = method.client_update(payload, None, data, 1, KEY)
    assert not loads
    # 2 and 1 of 8 and 4 hidden units: (4 + 1) 2 + (2 + 1) 1 + (1 + 1) 3 weights.
    assert sent.weights.shape == payload.weights.shape == (19,)
    assert method.num_weights("a") == 19
    assert method.bytes_up("a") == 76
    # Of the 4*8 + 8*4 + 4*3 products of the whole network.
    assert method.work("a") == (4 * 2 + 2 * 1 + 1 * 3) / 76
    part = method._part(0.25).task
    trained = local_sgd(part, payload.weights, data.train, 0.1, KEY)
    assert torch.equal(sent.weights, trained.weights)


class TestMaskedLabels:
    """Logits of labels that a client does not have are 0 to it."""

    def masked(self, **settings: Any) -> HeteroFL:
        task = plain_task(EVERYTHING)
        return method_of(task, mask_labels=True, widths=(1.0, 0.5), **settings)

    def test_their_rows_end_as_they_were(self) -> None:
        method = self.masked(client_widths={"a": 0.5})
        state = start(method)
        payload = method.broadcast(state, "a", KEY)
        _, sent = method.client_update(payload, None, noisy(9, 0, 1, labels=2), 1, KEY)
        rows = method._part(0.5).labels
        moved = sent.weights != payload.weights
        assert not bool(moved[rows == 2].any())
        assert all(bool(moved[rows == label].any()) for label in (0, 1))
        assert bool(moved[rows == -1].any())

    def test_only_those_with_a_label_count_in_its_row(self) -> None:
        method = self.masked(client_widths={"a": 1.0, "b": 1.0})
        state = start(method)
        sent = {}
        for client, labels in (("a", 2), ("b", 3)):
            payload = method.broadcast(state, client, KEY)
            data = noisy(9, 0, 1, labels=labels)
            sent[client] = method.client_update(payload, None, data, 1, KEY)[1]
        averaged = method.aggregate(state, iter(sent.items())).weights
        rows = method._part(1.0).labels
        mean = (sent["a"].weights.double() + sent["b"].weights) / 2
        assert torch.equal(averaged[rows == 2], sent["b"].weights[rows == 2])
        assert torch.equal(averaged[rows != 2], mean.float()[rows != 2])

    def test_the_loss_is_that_of_masked_logits_by_hand(self) -> None:
        task = two_hidden(1, 0, 0, 0, 2, 0, 5, 0, batch_size=1, learning_rate=1.0)
        masked = method_of(task, widths=(1.0,), mask_labels=True)
        payload = masked.broadcast(start(masked), "a", KEY)
        data = noisy(1, 0, 1, labels=1)
        white = replace(data.train, images=torch.full_like(data.train.images, 255))
        data = replace(data, train=white.take(torch.tensor([0])))
        data.train.images.resize_(1, 1, 1, 1)
        # z = 1, logits (2, 5 masked to 0).
        _, sent = masked.client_update(payload, None, data, 1, KEY)
        expected = -torch.log_softmax(torch.tensor([2.0, 0.0]), dim=0)[0]
        assert sent.train_loss == pytest.approx(float(expected))


class TestWidths:
    """Who has which part."""

    def test_shares_hold_on_average_and_choices_stay(self) -> None:
        settings: dict[str, Any] = {"widths": (1.0, 0.25), "shares": (3.0, 1.0)}
        method = method_of(plain_task(), **settings)
        clients = [f"client-{number}" for number in range(2000)]
        widths = [method.width(client) for client in clients]
        assert widths.count(0.25) / len(widths) == pytest.approx(0.25, abs=0.03)
        assert set(widths) == {1.0, 0.25}
        again = method_of(plain_task(), **settings)
        assert [again.width(client) for client in clients] == widths
        other = method_of(replace(plain_task(), key=RandomKey(8)), **settings)
        assert [other.width(client) for client in clients] != widths

    def test_slow_clients_have_small_parts(self) -> None:
        training = TrainingSettings(
            devices=DeviceSettings(examples_per_s=1, speed_spread=100)
        )
        clients = {f"client-{number}": 10 for number in range(300)}
        by_speed = method_of(
            plain_task(training), widths=(1.0, 0.5, 0.25), assignment="speed"
        )
        whole = of_name("fedavg", plain_task(training))
        fast = {client: by_speed.width(client) for client in clients}
        key = by_speed.task.key
        seconds = Devices(training, clients, whole, key)
        order = sorted(clients, key=seconds.work_s)
        assert [fast[client] for client in order] == sorted(fast.values(), reverse=True)
        for width in (1.0, 0.5, 0.25):
            assert [*fast.values()].count(width) == pytest.approx(100, abs=25)
        # Virtual time knows it.
        shorter = Devices(training, clients, by_speed, key)
        for client in clients:
            share = shorter.work_s(client) / seconds.work_s(client)
            assert share == pytest.approx(by_speed.work(client))

    def test_bytes_are_those_of_the_part(self) -> None:
        training = TrainingSettings(
            devices=DeviceSettings(bytes_down_per_s=1, bytes_up_per_s=2)
        )
        method = method_of(plain_task(training), client_widths={"a": 0.25})
        devices = Devices(training, {"a": 0}, method, method.task.key)
        assert devices.work_s("a") == 76 + 38
        sign = Choice("sign", COMPRESSORS["sign"].settings_type())
        compressed = Compressed(method.task, method, sign)
        assert compressed.bytes_up("a") < compressed.bytes_up(UNSEEN_CLIENT) < 76

    def test_a_width_by_speed_needs_speeds(self) -> None:
        settings = HeteroFLSettings(assignment="speed")
        (problem,) = problems_of(HeteroFL, settings)
        assert problem.place == "method.assignment"
        timed = TrainingSettings(devices=DeviceSettings())
        assert not problems_of(HeteroFL, settings, timed)
        traced = TrainingSettings(devices=DeviceSettings(trace="devices.csv"))
        assert problems_of(HeteroFL, settings, traced)

    def test_unknown_client_names_are_refused(self) -> None:
        method = method_of(plain_task(), client_widths={"site-a": 0.5})
        first = method.init(["site-a", "site-b"], KEY).weights
        assert torch.equal(first, method.task.initial_weights)
        with pytest.raises(ConfigError, match="named site-b, site-c and so on"):
            method.init(["site-b", "site-c"], KEY)

    def test_each_width_has_a_share(self) -> None:
        method = {"name": "heterofl", "widths": [1.0, 0.5], "shares": [1.0]}
        refused(document(method), "method", "1 shares, expected one for each of the 2")


def test_what_cannot_be_made_narrower_is_refused() -> None:
    with pytest.raises(ConfigError, match="a network with BatchNorm"):
        method_of(normed_task())
    with pytest.raises(ConfigError, match="a network of one width"):
        method_of(linear_task())
    task = plain_task()
    with pytest.raises(ConfigError, match="found frozen weights"):
        method_of(replace(task, frozen="0" * 64))

    def more_layers(_: float) -> FlatModel:
        return normed_task().model

    with pytest.raises(ConfigError, match="more than the number of channels"):
        method_of(replace(task, narrower=more_layers))

    def wrong_groups(_: float) -> FlatModel:
        raise ValueError("groups")

    with pytest.raises(ConfigError, match=r"at a width of 0\.0625: groups"):
        method_of(replace(task, narrower=wrong_groups))


def test_a_wrong_length_is_found() -> None:
    method = halves()
    payload = SubModel(torch.zeros(4), 0.5)
    assert method.update_problem(payload, update(1, 2, 3, 4)) is None
    assert method.update_problem(payload, update(1, 2)) is not None


def test_a_memory_is_one_of_the_clients_own_embeddings() -> None:
    task = plain_task(EVERYTHING)
    method = method_of(task, client_widths={"a": 0.25, "b": 1.0})
    memory = KnnMemory(task, method, KnnSettings())
    tuning = FineTuning(task, method, FineTuningSettings())
    state, data = start(method), noisy(9, 4, 1)
    images = noisy(5, 0, 2).train.images
    for client, size in (("a", 1), ("b", 4)):
        payload = method.broadcast(state, client, KEY)
        served = memory.personalize(payload, None, data, KEY)
        assert served.embed(images).shape == (5, size)
        assert served(images).shape == (5, 3)
        assert served.describe()["num_stored"] == 13
        tuned = tuning.personalize(payload, None, data, KEY)
        assert tuned.weights.shape == payload.weights.shape
        assert not torch.equal(tuned.weights, payload.weights)


class Wide(nn.Module):
    """A user's network."""

    def __init__(self, num_classes: int, width: float = 1.0) -> None:
        super().__init__()
        hidden = math.ceil(6 * width)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


def test_a_users_network_may_have_a_width() -> None:
    given = {"name": f"{__name__}:Wide", "width": 0.5}
    known = experiment_catalogue()
    chosen = load_experiment(document("heterofl", model=given), known)
    task = task_of_experiment(chosen, InputSpec((8, 8, 1), 10, (0.5,), (0.3,)))
    method = method_of(task, widths=(1.0, 0.5))
    # 3 hidden units of 64 pixels and the bias; a half of them is 2.
    assert task.model.num_weights == 3 * 65 + 10 * 4
    assert len(method._part(0.5).places) == 2 * 65 + 10 * 3
    whole = {"name": "tiny_cnn", "width": 0.5}
    settings = load_experiment(document("heterofl", model=whole), known).model
    assert narrower(settings, 0.5).settings == TinyCnnSettings(width=0.25)
    no_width = load_experiment(document("heterofl", model={"name": "resnet18"}), known)
    assert not can_be_narrower(no_width.model)
