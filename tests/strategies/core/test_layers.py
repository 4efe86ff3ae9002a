import pytest
import torch
from torch import Tensor, nn

from knnper.errors import ConfigError
from knnper.models.flat import EmbeddingModel, FlatModel
from knnper.strategies.core.task import first_layers, layers_left


class Layered(EmbeddingModel):
    """A head that is defined first, and a body that begins with normalisation."""

    embedding_dim, num_classes = 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        self.body = nn.Sequential(
            nn.BatchNorm2d(1),
            nn.Conv2d(1, 3, 2),
            nn.BatchNorm2d(3, affine=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3, 4),
            nn.LayerNorm(4),
        )

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features


@pytest.fixture
def model() -> FlatModel:
    return FlatModel(Layered())


LAYERS = [
    {"body.0", "body.1", "body.2"},
    {"body.5", "body.6"},
    {"classifier.1"},
]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_normalisation_belongs_to_the_layer_before(
    model: FlatModel, count: int
) -> None:
    mask = model.named(first_layers(model, count).float())
    found = {name.rpartition(".")[0] for name, part in mask.items() if part.all()}
    left_out = {name.rpartition(".")[0] for name, part in mask.items() if part.any()}
    assert found == left_out == set().union(*LAYERS[:count])


def test_statistics_go_with_their_module(model: FlatModel) -> None:
    mask = model.named(first_layers(model, 1).float())
    assert torch.equal(mask["body.2.running_var"], torch.ones(3))


def test_one_layer_at_least_is_left(model: FlatModel) -> None:
    assert [layers_left(model, taken, "num_x") for taken in (0, 1, 2)] == [3, 2, 1]
    message = r"method\.num_x: found 3, expected at most 2: of the model's 3 layers"
    with pytest.raises(ConfigError, match=message):
        layers_left(model, 3, "num_x")
