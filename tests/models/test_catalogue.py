"""Every model of the catalogue: shapes, determinism, training on one example."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import TORCH_DTYPES, InputSpec, normalizer
from knnper.errors import ConfigError
from knnper.experiment import Choice, Settings
from knnper.models.catalogue import MODELS, build_model
from knnper.models.flat import FlatModel, ModelSettings
from knnper.models.networks import (
    LeafCnnSettings,
    MlpSettings,
    MobileNetV2Settings,
    ResNet18Settings,
    SmallResNetSettings,
    SoftmaxRegressionSettings,
    StackedLstmSettings,
    TinyCnnSettings,
)
from knnper.process import import_torchvision
from knnper.seeding import RandomKey

KEY = RandomKey(1, ("initial-weights",))


def spec_of(size: int, channels: int, num_classes: int = 5) -> InputSpec:
    return InputSpec(
        image_shape=(size, size, channels),
        num_classes=num_classes,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )


def build(name: str, settings: Settings, spec: InputSpec) -> FlatModel:
    return build_model(Choice(name, settings), spec, KEY)


def pictures(spec: InputSpec, count: int) -> Tensor:
    limit = spec.num_classes if spec.dtype == "token" else 256
    drawn = RandomKey(2).numpy().integers(0, limit, (count, *spec.image_shape), "uint8")
    return normalizer(spec)(torch.from_numpy(drawn).to(TORCH_DTYPES[spec.dtype]))


EVERY_MODEL = [
    pytest.param("leaf_cnn", LeafCnnSettings(), spec_of(28, 1), 512, id="leaf-28x28"),
    pytest.param("leaf_cnn", LeafCnnSettings(), spec_of(32, 3), 512, id="leaf-32x32"),
    pytest.param("tiny_cnn", TinyCnnSettings(), spec_of(8, 1), 64, id="tiny"),
    pytest.param(
        "tiny_cnn",
        TinyCnnSettings(num_poolings=2),
        spec_of(32, 3),
        64,
        id="tiny-pooled",
    ),
    pytest.param(
        "small_resnet", SmallResNetSettings(), spec_of(32, 3), 256, id="small-resnet"
    ),
    pytest.param(
        "small_resnet",
        SmallResNetSettings(embedding_dim=128, norm="batch"),
        spec_of(17, 1),
        128,
        id="small-resnet-batch-grey",
    ),
    pytest.param(
        "mobilenet_v2", MobileNetV2Settings(), spec_of(32, 3), 1280, id="mobilenet"
    ),
    pytest.param(
        "mobilenet_v2",
        MobileNetV2Settings(norm="group"),
        spec_of(28, 1),
        1280,
        id="mobilenet-group-grey",
    ),
    pytest.param("resnet18", ResNet18Settings(), spec_of(32, 3), 512, id="resnet"),
    pytest.param(
        "resnet18",
        ResNet18Settings(norm="group", stem="cifar"),
        spec_of(8, 1),
        512,
        id="resnet-group-grey-small",
    ),
    pytest.param(
        "mlp", MlpSettings(hidden_sizes=(32, 16)), spec_of(8, 3), 16, id="mlp-images"
    ),
    pytest.param(
        "mlp",
        MlpSettings(hidden_sizes=(24,), norm="group"),
        InputSpec((1, 1, 7), 5, (0.5,) * 7, (2.0,) * 7, dtype="float32"),
        24,
        id="mlp-features-group",
    ),
    pytest.param(
        "softmax_regression",
        SoftmaxRegressionSettings(),
        spec_of(8, 3),
        192,
        id="softmax-images",
    ),
    pytest.param(
        "softmax_regression",
        SoftmaxRegressionSettings(),
        InputSpec((1, 1, 1), 5, (0.0,), (1.0,), dtype="float32"),
        1,
        id="softmax-constant",
    ),
    pytest.param(
        "stacked_lstm",
        StackedLstmSettings(hidden_dim=6),
        InputSpec((1, 1, 7), 5, (), (), dtype="token"),
        24,
        id="lstm",
    ),
]


@pytest.mark.parametrize(("name", "settings", "spec", "width"), EVERY_MODEL)
def test_shapes(name: str, settings: Settings, spec: InputSpec, width: int) -> None:
    module = build(name, settings, spec).module.eval()
    images = pictures(spec, 3)
    with torch.no_grad():
        embeddings = module.embed(images)
        logits = module(images)

    assert embeddings.shape == (3, width) == (3, module.embedding_dim)
    assert logits.shape == (3, 5) == (3, module.num_classes)
    assert torch.equal(module.head(embeddings), logits)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize(("name", "settings", "spec", "width"), EVERY_MODEL)
def test_one_example_can_be_trained_on(
    name: str, settings: Settings, spec: InputSpec, width: int
) -> None:
    model = build(name, settings, spec)
    model.module.train()
    logits = model.module(pictures(spec, 1))
    loss = functional.cross_entropy(logits, torch.tensor([2]))
    loss.backward()  # type: ignore[no-untyped-call]

    assert bool(torch.isfinite(model.gradient).all())
    assert float(model.gradient.abs().sum()) > 0


@pytest.mark.parametrize(("name", "settings", "spec", "width"), EVERY_MODEL)
def test_initial_weights_are_fixed_by_the_key(
    name: str, settings: Settings, spec: InputSpec, width: int
) -> None:
    weights = build(name, settings, spec).read()
    with RandomKey(99).torch():
        again = build(name, settings, spec).read()
    other = build_model(Choice(name, settings), spec, RandomKey(2)).read()

    assert torch.equal(weights, again)
    assert not torch.equal(weights, other)


def test_leaf_cnn_has_the_layers_of_leaf() -> None:
    spec = spec_of(28, 1, num_classes=62)
    model = build("leaf_cnn", LeafCnnSettings(embedding_dim=2048), spec)

    # 5*5*1*32+32, 5*5*32*64+64, 3136*2048+2048, 2048*62+62: LEAF's FEMNIST network.
    assert model.num_parameters == 832 + 51264 + 6424576 + 127038


def test_mobilenet_v2_normalises_every_convolution_in_the_chosen_way() -> None:
    batch = build("mobilenet_v2", MobileNetV2Settings(), spec_of(32, 3))
    group = build("mobilenet_v2", MobileNetV2Settings(norm="group"), spec_of(32, 3))

    def count(model: FlatModel, kind: type[nn.Module]) -> int:
        return sum(isinstance(layer, kind) for layer in model.module.modules())

    assert count(batch, nn.BatchNorm2d) == 52
    assert count(batch, nn.GroupNorm) == 0
    assert count(group, nn.BatchNorm2d) == 0
    assert count(group, nn.GroupNorm) == 52


def test_the_small_resnet_has_four_convolutions_and_a_residual_block() -> None:
    model = build("small_resnet", SmallResNetSettings(), spec_of(32, 3))
    convolutions = 9 * (3 * 32 + 32 * 64 + 64 * 128 + 2 * 128 * 128 + 128 * 256)
    norms = 2 * (32 + 64 + 128 + 2 * 128 + 256)
    head = 256 * 5 + 5

    assert model.num_parameters == convolutions + norms + head


def test_the_residual_block_adds_to_what_it_is_given() -> None:
    module = build("small_resnet", SmallResNetSettings(), spec_of(32, 3)).module
    (block,) = (part for part in module.modules() if hasattr(part, "residual"))
    x = torch.rand(2, 128, 4, 4)
    with torch.no_grad():
        added = block(x) - x
        for weights in block.parameters():
            weights.zero_()

    assert float(added.detach().min()) >= 0 < float(added.detach().max())
    assert torch.equal(block(x), x)


def test_resnet18_has_the_layers_of_torchvision() -> None:
    published = import_torchvision().models.resnet18(num_classes=5)
    expected = sum(one.numel() for one in published.parameters())
    batch = build("resnet18", ResNet18Settings(), spec_of(64, 3))
    group = build("resnet18", ResNet18Settings(norm="group"), spec_of(64, 3))

    assert batch.num_parameters == group.num_parameters == expected
    kinds = [type(layer) for layer in group.module.modules()]
    assert (kinds.count(nn.GroupNorm), kinds.count(nn.BatchNorm2d)) == (20, 0)


def test_resnet18_computes_what_torchvision_computes() -> None:
    model = build("resnet18", ResNet18Settings(), spec_of(64, 3))
    published = import_torchvision().models.resnet18(num_classes=5).eval()
    state = model.module.state_dict()
    published.load_state_dict(
        {name.replace("classifier.", "fc."): state[name] for name in state}
    )
    images = pictures(spec_of(64, 3), 2)
    with torch.no_grad():
        torch.testing.assert_close(model.module.eval()(images), published(images))


def test_the_stem_for_small_images_keeps_their_size() -> None:
    small = build("resnet18", ResNet18Settings(stem="cifar"), spec_of(32, 3))
    large = build("resnet18", ResNet18Settings(), spec_of(32, 3))

    # 3x3 in place of 7x7 weights, of 3 channels for each of 64.
    assert large.num_parameters - small.num_parameters == (49 - 9) * 3 * 64
    seen = []
    layer = small.module.get_submodule("layer1")
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    small.module.eval()(pictures(spec_of(32, 3), 1))
    assert seen == [(1, 64, 32, 32)]


def test_mlp_has_the_layers_that_are_asked_for() -> None:
    spec = spec_of(2, 3)
    plain = build("mlp", MlpSettings(hidden_sizes=(16, 8)), spec)
    group = build("mlp", MlpSettings(hidden_sizes=(16, 8), norm="group"), spec)

    # 12*16+16, 16*8+8, 8*5+5; GroupNorm adds two numbers for each hidden unit.
    assert plain.num_parameters == 208 + 136 + 45
    assert group.num_parameters == plain.num_parameters + 2 * (16 + 8)
    with pytest.raises(ValueError, match="found hidden_sizes of 12 with norm = group"):
        MlpSettings(hidden_sizes=(16, 12), norm="group")


def test_mobilenet_v2_repeats_a_grey_channel() -> None:
    grey = build("mobilenet_v2", MobileNetV2Settings(), spec_of(32, 1)).module.eval()
    images = pictures(spec_of(32, 1), 2)
    with torch.no_grad():
        assert torch.equal(grey(images), grey(torch.cat([images] * 3, dim=1)))


def test_mobilenet_v2_drops_features_before_the_head_in_training_only() -> None:
    settings = MobileNetV2Settings(norm="group", dropout=0.5)
    module = build("mobilenet_v2", settings, spec_of(32, 3)).module
    embeddings = torch.ones(2, 1280)
    with RandomKey(3).torch():
        dropped = module.train().head(embeddings)

    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(*module.eval().head(embeddings))


@pytest.mark.parametrize(
    ("name", "settings", "size", "channels", "message"),
    [
        ("leaf_cnn", LeafCnnSettings(), 30, 1, "multiples of 4, found 30x30"),
        ("leaf_cnn", LeafCnnSettings(), 28, 2, "1 or 3 channels, found 2"),
        ("tiny_cnn", TinyCnnSettings(), 7, 1, "multiples of 2, found 7x7"),
        (
            "tiny_cnn",
            TinyCnnSettings(num_poolings=2),
            6,
            1,
            "multiples of 4, found 6x6",
        ),
        (
            "small_resnet",
            SmallResNetSettings(),
            15,
            3,
            "small_resnet takes images of 16x16 pixels and more, found 15x15",
        ),
        ("mobilenet_v2", MobileNetV2Settings(), 32, 4, "1 or 3 channels, found 4"),
        ("resnet18", ResNet18Settings(), 32, 2, "1 or 3 channels, found 2"),
    ],
)
def test_images_of_another_shape_are_refused(
    name: str, settings: Settings, size: int, channels: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, settings, spec_of(size, channels))

    assert [problem.place for problem in caught.value.problems] == ["model"]
    assert "choose another model or data set" in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"stacked_lstm"}))
def test_text_is_refused_by_all_that_is_not_made_for_it(name: str) -> None:
    text = InputSpec((1, 1, 1), 5, (), (), dtype="token")
    message = rf"model: {name} takes images \(uint8\) or .*, found text \(token\)"
    with pytest.raises(ConfigError, match=message):
        build(name, MODELS[name].settings_type(), text)


def test_images_are_refused_by_the_lstm() -> None:
    message = r"takes text \(token\), found images \(uint8\); choose another model"
    with pytest.raises(ConfigError, match=message):
        build("stacked_lstm", StackedLstmSettings(), spec_of(8, 1))


def test_settings_of_another_model_are_refused() -> None:
    with pytest.raises(TypeError, match="tiny_cnn takes TinyCnnSettings, found Leaf"):
        build("tiny_cnn", LeafCnnSettings(), spec_of(8, 1))


def test_every_entry_takes_a_weights_file() -> None:
    assert MODELS.keys() == {
        "leaf_cnn",
        "tiny_cnn",
        "small_resnet",
        "mobilenet_v2",
        "resnet18",
        "mlp",
        "softmax_regression",
        "stacked_lstm",
    }
    assert all(
        issubclass(entry.settings_type, ModelSettings) for entry in MODELS.values()
    )
