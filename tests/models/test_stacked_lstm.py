"""The stacked LSTM against torch's own, and its loss against one worked by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from knnper.data.examples import InputSpec
from knnper.flat_model import FlatModel
from knnper.models import build_model
from knnper.networks import StackedLstm, StackedLstmSettings
from knnper.seeding import RandomKey
from knnper.settings import Choice
from knnper.strategies.core.blocks import layers
from knnper.strategies.core.sharing import first_layers

SPEC = InputSpec((1, 1, 6), 4, (), (), dtype="token")
SMALL = StackedLstmSettings(character_dim=3, hidden_dim=5)


def built(settings: StackedLstmSettings, spec: InputSpec = SPEC) -> FlatModel:
    return build_model(Choice("stacked_lstm", settings), spec, RandomKey(1))


def module_of(settings: StackedLstmSettings) -> StackedLstm:
    module = built(settings).module
    assert isinstance(module, StackedLstm)
    return module


def windows(count: int, length: int = 6) -> Tensor:
    drawn = RandomKey(2).numpy().integers(0, 4, (count, length, 1, 1))
    return torch.from_numpy(drawn)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_representation_is_all_states_of_torchs_lstm(num_layers: int) -> None:
    settings = StackedLstmSettings(character_dim=3, hidden_dim=5, num_layers=num_layers)
    module = module_of(settings)
    torchs = nn.LSTM(3, 5, num_layers=num_layers, batch_first=True)
    of_layers = {
        name.replace("_l0", f"_l{number}"): value
        for number, layer in enumerate(module.layers)
        for name, value in layer.state_dict().items()
    }
    torchs.load_state_dict(of_layers)
    x = windows(7)
    outputs, (hidden, cells) = torchs(module.characters(x[:, :, 0, 0]))
    expected = torch.cat([*hidden, *cells], dim=1)

    torch.testing.assert_close(module.embed(x), expected)
    assert module.embedding_dim == 2 * num_layers * 5
    torch.testing.assert_close(module(x), module.classifier.linear(outputs[:, -1]))


def test_the_papers_network() -> None:
    model = built(StackedLstmSettings(), InputSpec((1, 1, 80), 81, (), (), "token"))
    assert model.module.embedding_dim == 1024
    # 81*8 characters, 4 gates of 256 units with two biases, 256*81+81 of the head.
    first, second = 4 * 256 * (8 + 256 + 2), 4 * 256 * (256 + 256 + 2)
    assert model.num_parameters == 81 * 8 + first + second + 256 * 81 + 81


def test_the_loss_by_hand() -> None:
    module = module_of(SMALL)
    with torch.no_grad():
        module.classifier.linear.weight.zero_()
        shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
        module.classifier.linear.bias.copy_(shares.log())
    x = torch.tensor([0, 0, 1, 2, 0, 3]).reshape(1, 6, 1, 1)
    # Targets 0, 1, 2, 0, 3 and then the label 1 have the bits 1, 2, 3, 1, 3 and 2.
    expected = math.log(2) * (1 + 2 + 3 + 1 + 3 + 2) / 6
    found = module.losses(x, torch.tensor([1])).detach()
    assert found.tolist() == [pytest.approx(expected)]


def test_each_lstm_is_a_layer_of_its_own() -> None:
    model = built(SMALL)
    assert set(layers(model).of_weight.tolist()) == {0, 1, 2, 3}
    sizes = [int(first_layers(model, count).sum()) for count in (1, 2, 3, 4)]
    first, second, head = 4 * 5 * (3 + 5 + 2), 4 * 5 * (5 + 5 + 2), 5 * 4 + 4
    steps = [4 * 3, first, second, head]
    assert sizes == [sum(steps[: count + 1]) for count in range(4)]
