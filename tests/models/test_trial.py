"""Networks that users wrote for plain torch: they run as in torch, or are refused."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import Examples, InputSpec, Vocabulary
from knnper.embedding_model import EmbeddingModel, OwnModelSettings
from knnper.errors import OwnCodeError
from knnper.experiment import TrainingSettings
from knnper.flat_model import FlatModel
from knnper.models import build_model
from knnper.seeding import RandomKey
from knnper.settings import Choice
from knnper.split_network import split
from knnper.strategies.core.assembly import build_task
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.trial import try_out

ROWS = InputSpec((1, 1, 6), 3, (0.0,) * 6, (1.0,) * 6, dtype="float32")
COLOUR = InputSpec((12, 12, 3), 3, (0.5,) * 3, (0.25,) * 3)


def choice_of(entry: Callable[[], nn.Module], **settings: Any) -> Choice[Any]:
    return Choice("model:Net", OwnModelSettings(**settings), entry)


def built(
    entry: Callable[[], nn.Module], spec: InputSpec, **settings: Any
) -> FlatModel:
    return build_model(choice_of(entry, **settings), spec, RandomKey(1))


def task_of(entry: Callable[[], nn.Module], spec: InputSpec) -> Task:
    training = TrainingSettings(batch_size=4, learning_rate=0.1)
    key = RandomKey(1)
    return build_task(choice_of(entry), training, spec, key, evaluation_batch_size=8)


def examples_of(spec: InputSpec, num_examples: int = 12) -> Examples:
    generator = RandomKey(2).numpy()
    if spec.dtype == "uint8":
        drawn = generator.integers(0, 256, (num_examples, *spec.image_shape), "uint8")
    else:
        drawn = generator.normal(size=(num_examples, *spec.image_shape)).astype("f4")
    labels = torch.arange(num_examples) % spec.num_classes
    return Examples(torch.from_numpy(drawn), labels)


# --- memory format


class Lenet(nn.Module):
    """The network of quick starts, flattened as they do it."""

    def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(24, 8), nn.Linear(8, 3)
        self.flatten = flatten

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x))[:, :, :2, :2], 1)
        x = functional.relu(self.fc1(self.flatten(x)))
        logits: Tensor = self.fc2(x)
        return logits


def as_in_memory(x: Tensor) -> Tensor:
    """Return rows of the numbers in the order in which they lie in memory."""
    # A plain tensor of the same memory: its address is all that is looked at.
    size = (len(x), x[0].numel())
    return torch.as_strided(x, size, (size[1], 1))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1, 24),
    "view of a transposed map": lambda x: (
        x.transpose(2, 3).transpose(2, 3).view(-1, 24)
    ),
    "strides": as_in_memory,
}
ANY_FORMAT: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: torch.flatten(x, 1),
    "reshape": lambda x: x.reshape(len(x), -1),
    "permute": lambda x: x.permute(0, 3, 2, 1).reshape(len(x), -1),
    "split channels": lambda x: x.view(-1, 2, 3, 2, 2).flatten(1),
    "transpose": lambda x: x.flatten(1).T.contiguous().T,
}


def logits_in_plain_torch(entry: Callable[[], nn.Module], images: Tensor) -> Tensor:
    """Return logits of contiguous inputs and weights, as a user writes it."""
    with RandomKey(1).child("model").torch():
        network = entry().eval()
    scaled = (images.permute(0, 3, 1, 2).contiguous() / 255 - 0.5) / 0.25
    with torch.no_grad():
        logits: Tensor = network(scaled)
    return logits


@pytest.mark.parametrize(
    ("flatten", "memory_format"),
    [
        *((one, "contiguous") for one in VIEWS.values()),
        *((one, "channels_last") for one in ANY_FORMAT.values()),
    ],
    ids=[*VIEWS, *ANY_FORMAT],
)
def test_network_runs_as_in_plain_torch_in_the_faster_format_that_it_takes(
    flatten: Callable[[Tensor], Tensor],
    memory_format: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    task = task_of(lambda: Lenet(flatten), COLOUR)
    assert task.model.module.memory_format == memory_format
    warnings = [one for one in caplog.messages if "model:Net" in one]
    assert len(warnings) == (memory_format == "contiguous")
    images = examples_of(COLOUR).images
    expected = logits_in_plain_torch(lambda: Lenet(flatten), images)
    found = task.logits(task.initial_weights, images)
    torch.testing.assert_close(found, expected)


def test_training_in_contiguous_memory_is_that_of_plain_torch() -> None:
    task, examples = task_of(lambda: Lenet(VIEWS["view"]), COLOUR), examples_of(COLOUR)
    result = local_sgd(
        task, task.initial_weights, examples, 0.1, RandomKey(3), num_epochs=1
    )
    weight = task.model.module.get_parameter("features.conv2.weight")
    assert weight.is_contiguous()
    with RandomKey(1).child("model").torch():
        network = Lenet(VIEWS["view"])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    shuffled = RandomKey(3).child("batches").numpy().permutation(12)
    inputs = (examples.images.permute(0, 3, 1, 2).contiguous() / 255 - 0.5) / 0.25
    for batch in torch.split(torch.from_numpy(shuffled), 4):
        optimizer.zero_grad()
        logits = network(inputs[batch])
        functional.cross_entropy(logits, examples.labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    named = task.model.named(result.weights)
    for name, parameter in network.named_parameters():
        name = f"features.{name}".replace("features.fc2", "classifier")
        torch.testing.assert_close(named[name], parameter.detach())


def test_view_in_training_alone_decides_too() -> None:
    class InTraining(Lenet):
        def forward(self, x: Tensor) -> Tensor:
            chosen = "view" if self.training else "flatten"
            self.flatten = {**VIEWS, **ANY_FORMAT}[chosen]
            return super().forward(x)

    model = built(lambda: InTraining(VIEWS["view"]), COLOUR)
    assert model.module.memory_format == "contiguous"


def test_view_of_images_with_no_convolution_decides_too() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3 * 12 * 12, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(x.view(-1, 3 * 12 * 12))
            return logits

    assert built(Flat, COLOUR).module.memory_format == "contiguous"


def test_one_channel_lies_in_memory_as_torch_makes_it() -> None:
    class Grey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(400, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(self.conv(x).view(-1, 400))
            return logits

    spec = InputSpec((12, 12, 1), 3, (0.5,), (0.25,))
    task = task_of(Grey, spec)
    assert task.model.module.memory_format == "contiguous"
    images = examples_of(spec).images
    assert task.logits(task.initial_weights, images).shape == (12, 3)
    result = local_sgd(task, task.initial_weights, examples_of(spec), 0.1, RandomKey(3))
    assert result.num_steps == 3


def test_convolution_over_rows_decides_too() -> None:
    class OverRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 3, (1, 2)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x.view(-1, 2, 1, 3))
            logits: Tensor = self.out(x.view(-1, 6))
            return logits

    assert built(OverRows, ROWS).module.memory_format == "contiguous"


def test_network_may_refuse_numbers_that_its_data_does_not_have() -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 3, (1, 2)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            if float(x.min()) < 0:
                raise ValueError("expected counts")
            logits: Tensor = self.out(self.conv(x.view(-1, 2, 1, 3)).view(-1, 6))
            return logits

    assert built(Positive, ROWS).module.memory_format == "contiguous"


def test_format_that_is_given_is_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    def entry() -> nn.Module:
        return Lenet(ANY_FORMAT["flatten"])

    plain = built(entry, COLOUR, memory_format="contiguous")
    assert plain.module.memory_format == "contiguous"
    last = built(entry, COLOUR, memory_format="channels_last")
    assert not torch.equal(plain.read(), last.read()), "the order in memory differs"
    for name, tensor in plain.named(plain.read()).items():
        assert torch.equal(tensor, last.named(last.read())[name])
    assert not caplog.messages


def test_network_that_runs_in_no_format_is_refused_with_its_own_error() -> None:
    with pytest.raises(OwnCodeError, match=r"model:Net failed .*shape '\[-1, 7\]'"):
        built(lambda: Lenet(lambda x: x.view(-1, 7)), COLOUR)


# --- what a pass leaves behind


class Centred(nn.Module):
    """Rows less a running mean, which ``update`` moves; a hidden layer; a head."""

    mean: Tensor
    cached: Tensor
    steps: Tensor

    def __init__(self, update: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("cached", torch.zeros(6), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.attribute = torch.zeros(6)
        self.rate = 0.1
        self.history: list[Tensor] = []
        self.last: Tensor | None = None
        self.norm = nn.BatchNorm1d(8)
        self.group = nn.GroupNorm(2, 8)
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        self.update(self, x.detach().mean(0))
        x = self.hidden(x - self.mean - self.cached - self.attribute)
        logits: Tensor = self.out(torch.relu(self.group(self.norm(x))))
        return logits


def moved(mean: Tensor, batch: Tensor) -> Tensor:
    return 0.9 * mean + 0.1 * batch


def copies(network: Any, batch: Tensor) -> None:
    if network.training:
        network.mean.copy_(moved(network.mean, batch))


def assigns(network: Any, batch: Tensor) -> None:
    if network.training:
        network.mean = moved(network.mean, batch)


def assigns_data(network: Any, batch: Tensor) -> None:
    if network.training:
        network.mean.data = moved(network.mean, batch)


def registers_again(network: Any, batch: Tensor) -> None:
    if network.training:
        network.register_buffer("mean", moved(network.mean, batch))


def assigns_a_parameters_relative(network: Any, batch: Tensor) -> None:
    if network.training:
        network.mean = (
            moved(network.mean, batch) + 0 * network.hidden.bias[:6]
        ).detach()


@pytest.mark.parametrize(
    "update",
    [assigns, assigns_data, registers_again, assigns_a_parameters_relative],
)
def test_buffer_that_forward_assigns_is_trained_as_one_that_is_written_to(
    update: Callable[[Any, Tensor], None],
) -> None:
    examples = examples_of(ROWS)
    found = []
    for each in (copies, update):
        task = task_of(functools.partial(Centred, each), ROWS)
        weights = task.initial_weights
        # Two clients that start from the same weights, one after the other.
        results = [
            local_sgd(task, weights, examples.take(rows), 0.1, RandomKey(4)).weights
            for rows in (torch.arange(4), torch.arange(4, 12))
        ]
        mean = task.model.named(results[1])["features.mean"]
        found.append((results, task.logits(results[0], examples.images), mean))
    (copied, logits, mean), (assigned, others, others_mean) = found
    assert all(map(torch.equal, copied, assigned))
    assert torch.equal(logits, others)
    expected = torch.zeros(6)
    shuffled = RandomKey(4).child("batches").numpy().permutation(8)
    for batch in torch.split(torch.from_numpy(shuffled), 4):
        rows = examples.images[4:].flatten(1)[batch]
        expected = 0.9 * expected + 0.1 * rows.mean(0)
    torch.testing.assert_close(others_mean, expected)
    torch.testing.assert_close(mean, expected)


def test_passes_aside_leave_an_assigned_buffer_as_it_was() -> None:
    flat = built(lambda: Centred(assigns), ROWS)
    flat.module.train()
    flat.module(torch.ones(4, 6, 1, 1))
    first = flat.buffers.clone()
    place = next(one for one in flat.entries if one.name == "features.mean")
    part = slice(place.start - flat.num_parameters, place.stop - flat.num_parameters)
    torch.testing.assert_close(first[part], torch.full((6,), 0.1))
    flat.module(torch.ones(4, 6, 1, 1))
    flat.buffers.copy_(first)
    assert torch.equal(flat.module.get_buffer("features.mean"), first[part])


def test_assigned_buffer_of_another_shape_is_refused() -> None:
    def late(network: Any, batch: Tensor) -> None:
        if network.training and network.rate == 0:
            network.mean = batch[:, None].expand(6, 2)

    flat = built(lambda: Centred(late), ROWS)
    flat.module.get_submodule("features").rate = 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        flat.module.train()(torch.ones(4, 6, 1, 1))
    with pytest.raises(
        OwnCodeError, match=r"\(6, 2\) of torch.float32 to the buffer f"
    ):
        flat.read()


def in_evaluation(network: Any, batch: Tensor) -> None:
    network.mean.copy_(moved(network.mean, batch))


def in_evaluation_assigned(network: Any, batch: Tensor) -> None:
    network.cached = moved(network.cached, batch)


def attribute(network: Any, batch: Tensor) -> None:
    if network.training:
        network.attribute = moved(network.attribute, batch)


def in_a_list(network: Any, batch: Tensor) -> None:
    if network.training:
        network.history.append(batch)
    if network.history:
        network.attribute = torch.stack(network.history).mean(0)


def in_python(network: Any, batch: Tensor) -> None:
    network.rate += 0.1 * network.training
    network.attribute.fill_(network.rate)


def parameter_anew(network: Any, batch: Tensor) -> None:
    network.hidden.weight = nn.Parameter(network.hidden.weight.clamp(-0.1, 0.1))


def parameters_memory(network: Any, batch: Tensor) -> None:
    # Twice, as the allocator gives the memory of the first back.
    for _ in range(2):
        network.hidden.weight.data = network.hidden.weight.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (in_evaluation, "changes mean in evaluation mode"),
        (in_evaluation_assigned, "changes cached in evaluation mode"),
        (attribute, "returns other outputs in a later pass"),
        (in_a_list, "returns other outputs in a later pass"),
        (in_python, "returns other outputs in a later pass"),
        (parameter_anew, r"assigns hidden\.weight in forward"),
        (parameters_memory, r"assigns hidden\.weight in forward"),
    ],
)
def test_network_that_keeps_what_no_client_sends_is_refused(
    update: Callable[[Any, Tensor], None], message: str
) -> None:
    with pytest.raises(OwnCodeError, match=f"^model:Net {message}"):
        built(lambda: Centred(update), ROWS)


def test_whole_number_on_which_outputs_depend_is_refused() -> None:
    def kept(network: Any, batch: Tensor) -> None:
        network.steps += network.training
        network.attribute = torch.full((6,), float(network.steps))

    with pytest.raises(OwnCodeError, match="returns other outputs in a later pass"):
        built(lambda: Centred(kept), ROWS)


def noted(network: Any, batch: Tensor) -> None:
    network.last = batch
    network.history.append(batch)
    network.rate += 1
    network.steps += 1
    if not hasattr(network, "positions"):
        network.register_buffer("positions", torch.arange(6.0))


def test_what_no_output_depends_on_may_be_kept_and_the_trial_leaves_no_trace() -> None:
    network = Centred(noted)
    model = split(network, torch.ones(2, 6))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    network.last, network.rate, network.history = None, 0.1, []
    del network.positions
    try_out(model, ROWS, "model:Net", is_users=True)
    assert (network.last, network.rate) == (None, 0.1)
    assert not hasattr(network, "positions")
    assert network.training
    after = model.state_dict()
    assert after.keys() == before.keys() - {"features.positions"}
    assert all(torch.equal(after[name], before[name]) for name in after)
    names = {entry.name for entry in FlatModel(model).entries}
    assert {"features.mean", "features.cached", "features.norm.running_mean"} <= names


def test_each_client_begins_with_the_whole_numbers_that_the_model_was_built_with() -> (
    None
):
    class Cumulative(nn.Module):
        """A running mean over all batches so far, as BatchNorm without momentum."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(self.norm(x))
            return logits

    examples, task = examples_of(ROWS), task_of(Cumulative, ROWS)
    first, again = (
        local_sgd(task, task.initial_weights, examples, 0.1, RandomKey(5)).weights
        for _ in range(2)
    )
    assert torch.equal(first, again)
    mean = task.model.named(first)["features.norm.running_mean"]
    torch.testing.assert_close(mean, examples.images.flatten(1).mean(0))


# --- types of numbers


class Cast(nn.Module):
    """A network of other numbers than float32, which takes its inputs so."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.f = nn.Linear(6, 4), nn.Linear(4, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.f(self.a(x.to(self.a.weight.dtype)))
        return logits


class Mixed(nn.Module):
    """A network with a buffer of float64."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.f = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.f(x * self.scale)
        return logits


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            lambda: Cast(torch.float64),
            r"parameter features\.a\.weight .* torch\.float64",
        ),
        (lambda: Cast(torch.bfloat16), r"parameter .*a\.weight of .* torch\.bfloat16"),
        (lambda: Cast(torch.float16), r"parameter .*a\.weight of .* torch\.float16"),
        (Mixed, r"buffer features\.scale of the model is torch\.float64"),
    ],
)
def test_trained_numbers_that_are_not_float32_are_refused_by_name(
    entry: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(OwnCodeError, match=rf"the {message}.*expected torch\.float32"):
        built(entry, ROWS)


def test_frozen_numbers_of_another_type_stay_as_they_are() -> None:
    class HalfBody(Cast):
        def __init__(self) -> None:
            super().__init__(torch.bfloat16)
            self.f = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.f(self.a(x.bfloat16()).float())
            return logits

    model = built(HalfBody, ROWS, trained="head")
    assert model.module.get_parameter("features.a.weight").dtype == torch.bfloat16
    assert [entry.name for entry in model.entries] == [
        "classifier.weight",
        "classifier.bias",
    ]


class Bag(nn.Module):
    """The mean of the vectors of a text's tokens, with sparse gradients or dense."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.vectors = nn.Embedding(20, 4, sparse=sparse)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.vectors(x).mean(dim=1))
        return logits


def test_sparse_gradients_train_as_dense_ones() -> None:
    spec = InputSpec((1, 1, 5), 3, (), (), "ids", Vocabulary(size=20, padding_id=0))
    drawn = RandomKey(2).numpy().integers(0, 20, (12, 1, 1, 5), "int32")
    examples = Examples(torch.from_numpy(drawn), torch.arange(12) % 3)
    trained = []
    for sparse in (False, True):
        task = task_of(functools.partial(Bag, sparse=sparse), spec)
        start = task.initial_weights
        trained.append(local_sgd(task, start, examples, 0.1, RandomKey(3)).weights)
    assert torch.equal(*trained)


class Own(EmbeddingModel):
    """A model that defines its representation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 24, 3
        self.features, self.classifier = nn.Conv2d(3, 6, 11), nn.Linear(24, 3)

    def embed(self, x: Tensor) -> Tensor:
        return super().embed(x).view(-1, 24)


class Lazy(EmbeddingModel):
    """A model that makes a layer at its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 4, 3
        self.features, self.classifier = nn.Flatten(), nn.Linear(4, 3)

    def embed(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(6, 4)
        return super().embed(x.flatten(1)) @ self.late.weight.T


def test_layer_that_is_made_at_the_first_pass_is_refused() -> None:
    with pytest.raises(
        OwnCodeError, match=r"parameters late\.bias, late\.weight in for"
    ):
        built(Lazy, ROWS)


def test_embedding_model_of_a_user_is_tried_too() -> None:
    assert built(Own, COLOUR).module.memory_format == "contiguous"
