"""The flat vector is the model: same numbers, same training, no copies."""

import pytest
import torch
from torch import Tensor, nn

from knnper.data.examples import InputSpec
from knnper.embedding_model import EmbeddingModel
from knnper.flat_model import FlatModel
from knnper.layers import TolerantBatchNorm2d
from knnper.models import build_model
from knnper.networks import StackedLstmSettings
from knnper.seeding import RandomKey
from knnper.settings import Choice


class SmallModel(EmbeddingModel):
    """One convolution with BatchNorm on 2-channel images, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 3, 2
        self.features = nn.Sequential(
            nn.Conv2d(2, 3, kernel_size=3, padding=1, bias=False),
            TolerantBatchNorm2d(3),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(3, 2)

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(x)
        return features.mean(dim=(2, 3))


NUM_PARAMETERS = 3 * 2 * 9 + 2 * 3 + 3 * 2 + 2
NUM_WEIGHTS = NUM_PARAMETERS + 2 * 3


@pytest.fixture
def flat() -> FlatModel:
    with RandomKey(5).torch():
        return FlatModel(SmallModel())


def test_the_vector_holds_parameters_then_floating_point_buffers(
    flat: FlatModel,
) -> None:
    assert flat.num_parameters == NUM_PARAMETERS
    assert flat.num_weights == NUM_WEIGHTS
    with RandomKey(5).torch():
        expected = SmallModel().state_dict()
    found = flat.named(flat.read())
    assert list(found) == [
        "features.0.weight",
        "features.1.weight",
        "features.1.bias",
        "classifier.weight",
        "classifier.bias",
        "features.1.running_mean",
        "features.1.running_var",
    ]
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name])
        assert tensor.is_contiguous()


def test_the_module_is_a_view_of_the_vector_and_reading_gives_a_copy(
    flat: FlatModel,
) -> None:
    addresses = [tensor.data_ptr() for tensor in flat.module.parameters()]
    before = flat.read()
    flat.load(torch.full((NUM_WEIGHTS,), 0.25))
    assert all(bool((weight == 0.25).all()) for weight in flat.module.parameters())
    assert addresses == [tensor.data_ptr() for tensor in flat.module.parameters()]
    assert not torch.equal(before, flat.read())
    with torch.no_grad():
        flat.parameters.fill_(7.0)
    assert all(bool((weight == 7.0).all()) for weight in flat.module.parameters())


def test_convolutions_lie_channels_last_and_statistics_in_the_vector(
    flat: FlatModel,
) -> None:
    before = flat.read()
    flat.module(
        torch.from_numpy(RandomKey(6).numpy().normal(size=(4, 2, 5, 5))).float()
    )
    assert torch.equal(flat.read()[:NUM_PARAMETERS], before[:NUM_PARAMETERS])
    assert bool((flat.read()[NUM_PARAMETERS:] != before[NUM_PARAMETERS:]).all())
    flat.load(torch.arange(NUM_WEIGHTS, dtype=torch.float32))
    weight = flat.module.get_parameter("features.0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight[0, :, 0, 0].tolist() == [0.0, 1.0]
    assert weight[0, 0, 0, :].tolist() == [0.0, 2.0, 4.0]


def test_flatten_is_the_inverse_of_named_and_refuses_what_does_not_fit(
    flat: FlatModel,
) -> None:
    weights = torch.arange(NUM_WEIGHTS, dtype=torch.float32)
    tensors = flat.named(weights)
    assert torch.equal(flat.flatten(tensors), weights)
    tensors["classifier.bias"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"found shape \(3,\)"):
        flat.flatten(tensors)
    del tensors["classifier.bias"]
    with pytest.raises(ValueError, match=r"'classifier.bias'.*\(2,\), found nothing"):
        flat.flatten(tensors)
    with pytest.raises(ValueError, match=rf"expected {NUM_WEIGHTS} weights.*\(3,\)"):
        flat.load(torch.zeros(3))


def test_mask_chooses_by_module_type(flat: FlatModel) -> None:
    mask = flat.mask(lambda module: isinstance(module, nn.BatchNorm2d))
    chosen = [entry.name for entry in flat.entries if bool(mask[entry.start])]
    assert int(mask.sum()) == 4 * 3
    assert chosen == [
        "features.1.weight",
        "features.1.bias",
        "features.1.running_mean",
        "features.1.running_var",
    ]
    head = set(flat.module.classifier.modules())
    assert int(flat.mask(lambda module: module in head).sum()) == 3 * 2 + 2


def test_what_is_shown_is_copied_when_it_or_the_model_changed(flat: FlatModel) -> None:
    shown, other = torch.ones(NUM_WEIGHTS), torch.zeros(NUM_WEIGHTS)
    flat.show(shown)
    assert torch.equal(flat.read(), shown)
    flat.load(other)
    flat.show(shown)
    assert torch.equal(flat.read(), shown), "something else was loaded meanwhile"
    shown.mul_(3)
    flat.show(shown)
    assert torch.equal(flat.read(), shown), "the shown weights were changed in place"
    flat.show(other)
    assert torch.equal(flat.read(), other)


class TestFreezing:
    """What is not trained is in evaluation mode, for as long as it is not."""

    @pytest.fixture
    def with_dropout(self, flat: FlatModel) -> FlatModel:
        body, head = flat.module.get_submodule("features"), nn.Linear(3, 2)
        assert isinstance(body, nn.Sequential)
        body.append(nn.Dropout(0.5))
        flat.module.classifier = nn.Sequential(nn.Dropout(0.5), head)
        return FlatModel(flat.module)

    @staticmethod
    def training(flat: FlatModel, trained: str) -> dict[str, bool]:
        """Return which layers are in training mode while one part is trained."""
        part = set(flat.module.get_submodule(trained).modules())
        with flat.freezing(flat.mask(lambda module: module in part)):
            modules = flat.module.named_modules()
            return {name: module.training for name, module in modules if name}

    @pytest.mark.parametrize("trained", ["features", "classifier"])
    def test_a_container_of_which_nothing_is_trained_with_its_dropout(
        self, with_dropout: FlatModel, trained: str
    ) -> None:
        found = self.training(with_dropout, trained)
        assert {"features.3", "classifier.0"} < found.keys()
        for name, is_training in found.items():
            assert is_training == name.startswith(trained), name

    def test_a_layer_between_others_by_itself(self, with_dropout: FlatModel) -> None:
        found = self.training(with_dropout, "features.1")
        active = {name for name, is_training in found.items() if is_training}
        # What has no weights goes with its container, of which a part is trained.
        assert active == {"features", "features.1", "features.2", "features.3"}

    def test_all_is_as_before_afterwards(self, with_dropout: FlatModel) -> None:
        with_dropout.module.get_submodule("features.1").eval()
        before = {name: m.training for name, m in with_dropout.module.named_modules()}
        self.training(with_dropout, "classifier")
        after = {name: m.training for name, m in with_dropout.module.named_modules()}
        assert after == before
        assert all(p.requires_grad for p in with_dropout.module.parameters())

    def test_a_recurrent_layer_stays_as_it_is(self) -> None:
        spec = InputSpec((1, 1, 6), 4, (), (), dtype="token")
        settings = StackedLstmSettings(character_dim=3, hidden_dim=5)
        text = build_model(Choice("stacked_lstm", settings), spec, RandomKey(1))
        text.module.train()
        found = self.training(text, "characters")
        assert found["layers.0"]
        assert found["layers.1"]
        assert not found["classifier"]
