"""Every model of the catalogue: shapes, determinism, training on one example."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import InputSpec
from knnper.data.normalization import normalizer
from knnper.errors import ConfigError
from knnper.flat_model import FlatModel
from knnper.layers import TolerantBatchNorm2d
from knnper.models import MODELS, build_model
from knnper.networks import NORMS, MlpSettings
from knnper.process import import_torchvision
from knnper.seeding import RandomKey
from knnper.settings import Choice


def spec_of(size: int, channels: int, num_classes: int = 5) -> InputSpec:
    mean, std = (0.5,) * channels, (0.25,) * channels
    return InputSpec((size, size, channels), num_classes, mean, std)


def build(name: str, spec: InputSpec, seed: int = 1, **settings: Any) -> FlatModel:
    choice = Choice(name, MODELS[name].settings_type(**settings))
    return build_model(choice, spec, RandomKey(seed, ("initial-weights",)))


def pictures(spec: InputSpec, count: int) -> Tensor:
    limit = spec.num_classes if spec.dtype == "token" else 256
    drawn = RandomKey(2).numpy().integers(0, limit, (count, *spec.image_shape), "uint8")
    return normalizer(spec)(torch.from_numpy(drawn).to(spec.torch_dtype))


COLOUR = spec_of(32, 3)

FEATURES = InputSpec((1, 1, 7), 5, (0.5,) * 7, (2.0,) * 7, dtype="float32")

CONSTANT = InputSpec((1, 1, 1), 5, (0.0,), (1.0,), dtype="float32")

TEXT = InputSpec((1, 1, 7), 5, (), (), dtype="token")

every_model = pytest.mark.parametrize(
    ("name", "settings", "spec", "width"),
    [
        ("leaf_cnn", {}, spec_of(28, 1), 512),
        ("leaf_cnn", {}, COLOUR, 512),
        ("tiny_cnn", {}, spec_of(8, 1), 64),
        ("tiny_cnn", {"num_poolings": 2}, COLOUR, 64),
        ("small_resnet", {}, COLOUR, 256),
        ("small_resnet", {"embedding_dim": 128, "norm": "batch"}, spec_of(17, 1), 128),
        ("mobilenet_v2", {}, COLOUR, 1280),
        ("mobilenet_v2", {"norm": "group"}, spec_of(28, 1), 1280),
        ("resnet18", {}, COLOUR, 512),
        ("resnet18", {"norm": "group", "stem": "cifar"}, spec_of(8, 1), 512),
        ("mlp", {"hidden_sizes": (32, 16)}, spec_of(8, 3), 16),
        ("mlp", {"hidden_sizes": (24,), "norm": "group"}, FEATURES, 24),
        ("softmax_regression", {}, spec_of(8, 3), 192),
        ("softmax_regression", {}, CONSTANT, 1),
        ("stacked_lstm", {"hidden_dim": 6}, TEXT, 24),
    ],
)


@every_model
def test_shapes_weights_by_the_key_and_training_on_one_example(
    name: str, settings: dict[str, Any], spec: InputSpec, width: int
) -> None:
    model = build(name, spec, **settings)
    with RandomKey(99).torch():
        again = build(name, spec, **settings).read()
    assert torch.equal(model.read(), again)
    assert not torch.equal(again, build(name, spec, seed=2, **settings).read())

    module, images = model.module.eval(), pictures(spec, 3)
    with torch.no_grad():
        embeddings, logits = module.embed(images), module(images)
    assert embeddings.shape == (3, width) == (3, module.embedding_dim)
    assert logits.shape == (3, 5) == (3, module.num_classes)
    assert torch.equal(module.head(embeddings), logits)
    assert bool(torch.isfinite(logits).all())

    one = module.train()(pictures(spec, 1))
    functional.cross_entropy(one, torch.tensor([2])).backward()  # type: ignore[no-untyped-call]
    assert bool(torch.isfinite(model.gradient).all())
    assert float(model.gradient.abs().sum()) > 0


SMALL_RESNET = 9 * (3 * 32 + 32 * 64 + 64 * 128 + 2 * 128 * 128 + 128 * 256)


@pytest.mark.parametrize(
    ("name", "settings", "spec", "num_parameters"),
    [
        # 5*5*1*32+32, 5*5*32*64+64, 3136*2048+2048, 2048*62+62: LEAF's FEMNIST network.
        (
            "leaf_cnn",
            {"embedding_dim": 2048},
            spec_of(28, 1, num_classes=62),
            832 + 51264 + 6424576 + 127038,
        ),
        # Four convolutions and a residual block, their norms, and the head.
        (
            "small_resnet",
            {},
            COLOUR,
            SMALL_RESNET + 2 * (32 + 64 + 128 + 2 * 128 + 256) + 256 * 5 + 5,
        ),
        # 12*16+16, 16*8+8, 8*5+5; GroupNorm adds two numbers for each hidden unit.
        ("mlp", {"hidden_sizes": (16, 8)}, spec_of(2, 3), 208 + 136 + 45),
        (
            "mlp",
            {"hidden_sizes": (16, 8), "norm": "group"},
            spec_of(2, 3),
            208 + 136 + 45 + 2 * (16 + 8),
        ),
    ],
)
def test_the_number_of_parameters_by_hand(
    name: str, settings: dict[str, Any], spec: InputSpec, num_parameters: int
) -> None:
    assert build(name, spec, **settings).num_parameters == num_parameters
    with pytest.raises(ValueError, match="found hidden_sizes of 12 with norm = group"):
        MlpSettings(hidden_sizes=(16, 12), norm="group")


def test_mobilenet_v2_normalises_every_convolution_in_the_chosen_way() -> None:
    for norm, kind in (("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)):
        layers = list(build("mobilenet_v2", COLOUR, norm=norm).module.modules())
        norms = [
            one for one in layers if isinstance(one, nn.BatchNorm2d | nn.GroupNorm)
        ]
        assert len(norms) == 52
        assert all(isinstance(one, kind) for one in norms)


def test_the_residual_block_adds_to_what_it_is_given() -> None:
    module = build("small_resnet", COLOUR).module
    (block,) = (part for part in module.modules() if hasattr(part, "residual"))
    x = torch.rand(2, 128, 4, 4)
    with torch.no_grad():
        added = block(x) - x
        for weights in block.parameters():
            weights.zero_()

    assert float(added.detach().min()) >= 0 < float(added.detach().max())
    assert torch.equal(block(x), x)


def test_resnet18_is_that_of_torchvision() -> None:
    model, spec = build("resnet18", spec_of(64, 3)), spec_of(64, 3)
    published = import_torchvision().models.resnet18(num_classes=5).eval()
    expected = sum(one.numel() for one in published.parameters())
    group = build("resnet18", spec, norm="group")
    assert model.num_parameters == group.num_parameters == expected
    kinds = [type(layer) for layer in group.module.modules()]
    assert (kinds.count(nn.GroupNorm), kinds.count(nn.BatchNorm2d)) == (20, 0)

    state = model.module.state_dict()
    published.load_state_dict(
        {name.replace("classifier.", "fc."): state[name] for name in state}
    )
    images = pictures(spec, 2)
    with torch.no_grad():
        torch.testing.assert_close(model.module.eval()(images), published(images))


def test_the_stem_for_small_images_keeps_their_size() -> None:
    small = build("resnet18", COLOUR, stem="cifar")
    large = build("resnet18", COLOUR)

    # 3x3 in place of 7x7 weights, of 3 channels for each of 64.
    assert large.num_parameters - small.num_parameters == (49 - 9) * 3 * 64
    seen = []
    layer = small.module.get_submodule("layer1")
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    small.module.eval()(pictures(COLOUR, 1))
    assert seen == [(1, 64, 32, 32)]


def test_mobilenet_v2_repeats_a_grey_channel_and_drops_features_in_training() -> None:
    grey = build("mobilenet_v2", spec_of(32, 1), dropout=0.5).module.eval()
    images = pictures(spec_of(32, 1), 2)
    with torch.no_grad():
        assert torch.equal(grey(images), grey(torch.cat([images] * 3, dim=1)))
    embeddings = torch.ones(2, 1280)
    with RandomKey(3).torch():
        dropped = grey.train().head(embeddings)
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(*grey.eval().head(embeddings))


@pytest.mark.parametrize(
    ("name", "settings", "spec", "message"),
    [
        ("leaf_cnn", {}, spec_of(30, 1), "multiples of 4, found 30x30"),
        ("leaf_cnn", {}, spec_of(28, 2), "1 or 3 channels, found .* 2 channels"),
        ("tiny_cnn", {}, spec_of(7, 1), "multiples of 2, found 7x7"),
        ("tiny_cnn", {"num_poolings": 2}, spec_of(6, 1), "multiples of 4, found 6x6"),
        ("small_resnet", {}, spec_of(15, 3), "16x16 pixels and more, found 15x15"),
        ("mobilenet_v2", {}, spec_of(32, 4), "1 or 3 channels, found .* 4 channels"),
        ("resnet18", {}, spec_of(32, 2), "1 or 3 channels, found .* 2 channels"),
        (
            "stacked_lstm",
            {},
            spec_of(8, 1),
            r"text \(token\), found 8x8 .* images \(uint8\)",
        ),
        (
            "torchvision",
            {"architecture": "resnet18"},
            TEXT,
            r"images \(uint8\), found .* text \(token\)",
        ),
        *(
            (name, {}, TEXT, r"images \(uint8\) or .*, found .* text \(token\)")
            for name in sorted(MODELS)
            if MODELS[name].takes == ("uint8", "float32")
        ),
    ],
)
def test_inputs_of_another_kind_are_refused(
    name: str, settings: dict[str, Any], spec: InputSpec, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, spec, **settings)
    assert [problem.place for problem in caught.value.problems] == ["model"]
    assert "choose another model" in str(caught.value)


def test_a_single_value_is_normalised_with_the_running_statistics_that_stay() -> None:
    layer = TolerantBatchNorm2d(2, eps=0.0).train()
    layer.running_mean = torch.tensor([1.0, -1.0])
    layer.running_var = torch.tensor([4.0, 0.25])
    value = torch.tensor([3.0, 0.0]).view(1, 2, 1, 1)
    for _ in range(2):
        assert layer(value).flatten().tolist() == [1.0, 2.0]  # (3-1)/2, (0+1)/0.5


@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 2, 1, 2)])
def test_several_values_are_normalised_as_ever(shape: tuple[int, ...]) -> None:
    values = torch.arange(4.0).view(shape) ** 2
    ours, theirs = TolerantBatchNorm2d(2).train(), nn.BatchNorm2d(2).train()
    assert torch.equal(ours(values), theirs(values))
    both = ours.state_dict(), theirs.state_dict()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[1])


def test_group_norm_has_eight_groups() -> None:
    layer = NORMS["group"](16)
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (8, 16)
