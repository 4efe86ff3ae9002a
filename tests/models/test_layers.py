"""The faster layers compute what torch's do, and their gradients."""

import copy
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from knnper import layers
from knnper.embedding_model import EmbeddingModel
from knnper.flat_model import FlatModel
from knnper.layers import (
    DepthwiseConv2d,
    FasterLinear,
    FoldingSequential,
    PointwiseConv2d,
    TolerantBatchNorm2d,
    use_faster_layers,
)
from knnper.process import import_torchvision
from knnper.seeding import RandomKey


def images(num: int, channels: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height + 10 * width)
    values = torch.randn((num, height, width, channels), generator=generator)
    return values.double().permute(0, 3, 1, 2)


def results(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return what comes out, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    out = layer(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, *torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])


def faster(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    other = copy.deepcopy(layer)
    use_faster_layers(other)
    assert type(other) is kind
    return other


def compare(layer: nn.Module, kind: type[nn.Module], x: Tensor) -> None:
    for found, expected in zip(
        results(faster(layer, kind), x), results(layer, x), strict=True
    ):
        torch.testing.assert_close(found, expected)


@given(
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    kernel_size=st.sampled_from([(1, 3), (3, 3), (5, 3), (5, 5)]),
    stride=st.integers(1, 3),
    bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_depthwise_convolution_and_its_gradients_are_those_of_torch(
    height: int, width: int, kernel_size: tuple[int, int], stride: int, bias: bool
) -> None:
    padding = (kernel_size[0] // 2, kernel_size[1] // 2)
    layer = nn.Conv2d(3, 3, kernel_size, stride, padding, groups=3, bias=bias)
    compare(layer.double(), DepthwiseConv2d, images(2, 3, height, width))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_a_pointwise_convolution_and_its_gradients_are_those_of_torch(
    size: int, bias: bool
) -> None:
    layer, x = nn.Conv2d(3, 5, 1, bias=bias).double(), images(4, 3, size, size)
    assert "Convolution" in layer(x).grad_fn.name()
    assert "Permute" in faster(layer, PointwiseConv2d)(x).grad_fn.name()
    compare(layer, PointwiseConv2d, x)


def test_the_gradient_of_a_depthwise_weight_is_that_of_a_sum_by_hand() -> None:
    layer = nn.Conv2d(2, 2, 3, padding=1, groups=2, bias=False)
    layer.weight.data.zero_()
    use_faster_layers(layer)
    x = torch.tensor([[[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]]])
    out = layer(x.contiguous(memory_format=torch.channels_last))
    assert "Depthwise" in out.grad_fn.name()  # and not the gradient of torch
    out.sum().backward()
    assert layer.weight.grad is not None
    # Each place meets the pixels that lie below it, wherever the kernel stands.
    expected = [[1.0, 3, 2], [4, 10, 6], [3, 7, 4]]
    assert layer.weight.grad[0, 0].tolist() == expected
    assert layer.weight.grad[1, 0, 1, 1] == 26


def test_there_are_gradients_of_gradients() -> None:
    layer = faster(nn.Conv2d(2, 2, 3, padding=1, groups=2).double(), DepthwiseConv2d)
    x = images(2, 2, 2, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x).pow(2), x)


def test_one_call_for_many_sets_of_weights() -> None:
    layer = faster(nn.Conv2d(2, 2, 3, padding=1, groups=2), DepthwiseConv2d)
    x = images(3, 2, 2, 2).float()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found = torch.func.functional_call(layer, parameters, (x,))
        assert isinstance(found, Tensor)
        return found.pow(2).sum()

    both = {name: torch.stack([p, 2 * p]) for name, p in layer.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss))(both)
    for place in range(2):
        one = {name: p[place] for name, p in both.items()}
        expected = torch.func.grad(loss)(one)
        assert expected.keys() == both.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][place], gradient)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding="same", groups=4),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
        type("OfAUser", (nn.Conv2d,), {})(4, 4, 1),
    ],
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    before = type(layer)
    use_faster_layers(layer)
    assert type(layer) is before


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN compute all products that it can, whatever the processor is."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of torch has no such call")
    monkeypatch.setattr(layers, "_is_faster_in_onednn", lambda: True)
    monkeypatch.setattr(layers, "_LEAST_PRODUCTS", 1)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def same_as_in_double(
    of: Callable[[nn.Module, Tensor], tuple[Tensor, ...]], layer: nn.Linear, x: Tensor
) -> None:
    """Compare what is computed in single precision with torch in double precision."""
    exact = copy.deepcopy(layer).double()
    for found, expected in zip(
        of(faster(layer, FasterLinear), x), of(exact, x.double()), strict=True
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("onednn")
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    num_in=st.integers(1, 40),
    num_out=st.integers(1, 40),
    bias=st.booleans(),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_product_and_its_gradients_are_those_of_torch(
    shape: list[int], num_in: int, num_out: int, bias: bool
) -> None:
    layer, x = nn.Linear(num_in, num_out, bias=bias), values(*shape, num_in)
    same_as_in_double(results, layer, x)


@pytest.mark.usefixtures("onednn")
def test_a_product_is_onednns_where_it_is_faster() -> None:
    layer, x = faster(nn.Linear(3, 2), FasterLinear), values(4, 3)
    assert layer(x).grad_fn.next_functions[0][0].name() == "_ProductBackward"
    others = [x[:1], x.expand(1, 4, 3)[:, :1]]  # a row alone
    assert all("Addmm" in _origin(layer(one)) for one in others)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "_Product" not in _origin(layer(x))
    assert "Addmm" in _origin(layer.double()(x.double()))


def _origin(result: Tensor) -> str:
    names, steps = list[str](), [result.grad_fn]
    while steps:
        step = steps.pop()
        if step is not None:
            names.append(step.name())
            steps.extend(one for one, _ in step.next_functions)
    return " ".join(names)


@pytest.mark.usefixtures("onednn")
def test_a_small_product_is_mkls(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = faster(nn.Linear(3, 2), FasterLinear), values(4, 3)
    monkeypatch.setattr(layers, "_LEAST_PRODUCTS", 25)
    assert "_Product" not in _origin(layer(x))
    monkeypatch.setattr(layers, "_LEAST_PRODUCTS", 24)
    assert "_Product" in _origin(layer(x))


@pytest.mark.usefixtures("onednn")
def test_a_product_has_gradients_of_gradients() -> None:
    def second(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        given = x.clone().requires_grad_()
        loss = layer(given).pow(3).sum()
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), [given, *layer.parameters()])

    same_as_in_double(second, nn.Linear(7, 3), values(5, 7))


@pytest.mark.usefixtures("onednn")
def test_one_product_for_many_sets_of_weights() -> None:
    layer, x = faster(nn.Linear(4, 3), FasterLinear), values(5, 4)
    both = {name: torch.stack([p, 2 * p]) for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found = torch.func.functional_call(layer, parameters, (x,))
        assert isinstance(found, Tensor)
        return found.pow(2).sum()

    found = torch.func.vmap(torch.func.grad(loss))(both)
    for place in range(2):
        expected = torch.func.grad(loss)({name: p[place] for name, p in both.items()})
        assert expected.keys() == both.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][place], gradient)


class Normed(EmbeddingModel):
    """Two convolutions with BatchNorm, of which one has ReLU too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim = 3
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU6(),
            nn.Sequential(nn.Conv2d(4, 3, 1), TolerantBatchNorm2d(3)),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(3, 2)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, 0.5, 3)
                nn.init.normal_(layer.bias)
                layer.running_mean = torch.randn(layer.num_features)
                layer.running_var = torch.rand(layer.num_features) + 0.5


def normed() -> tuple[FlatModel, Tensor]:
    """Return a model in evaluation mode, and its weights."""
    with RandomKey(3).torch():
        module = Normed().eval()
    use_faster_layers(module)
    model = FlatModel(module)
    return model, model.read()


def evaluated(model: FlatModel, x: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model.module(x)
    return found.clone()


@pytest.fixture
def without_norms(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give what ends all calls of BatchNorm."""

    def fail(*_: object) -> NoReturn:
        raise AssertionError("BatchNorm was called")

    return lambda: monkeypatch.setattr(nn.BatchNorm2d, "forward", fail)


def test_batch_norm_is_folded_into_the_convolution_before_it(
    without_norms: Callable[[], None],
) -> None:
    model, weights = normed()
    x = images(5, 2, 6, 6).float()
    expected = evaluated(model, x)
    without_norms()
    model.show(weights)
    torch.testing.assert_close(evaluated(model, x), expected)


def test_what_is_folded_has_the_weights_that_are_shown_last() -> None:
    model, weights = normed()
    x = images(5, 2, 6, 6).float()
    for factor in (1.0, 1.5, 1.0):
        shown = factor * weights
        model.show(shown)
        found = evaluated(model, x)
        model.load(shown)
        torch.testing.assert_close(found, evaluated(model, x))
    shown.mul_(2)
    model.show(shown)
    found = evaluated(model, x)
    model.load(2 * weights)
    torch.testing.assert_close(found, evaluated(model, x))


def test_nothing_is_folded_but_where_weights_are_shown(
    without_norms: Callable[[], None],
) -> None:
    model, weights = normed()
    x = images(5, 2, 6, 6).float()
    model.show(weights)
    evaluated(model, x)
    other = copy.deepcopy(model.module)
    without_norms()
    evaluated(model, x)
    with pytest.raises(AssertionError, match="BatchNorm"), torch.inference_mode():
        other(x)  # whose weights anyone may change
    with pytest.raises(AssertionError, match="BatchNorm"):
        model.module(x)  # which may train
    model.load(weights)
    with pytest.raises(AssertionError, match="BatchNorm"):
        evaluated(model, x)
    model.show(weights)
    model.module.train()
    with pytest.raises(AssertionError, match="BatchNorm"):
        evaluated(model, x)


def test_hooks_are_called_though_layers_could_be_folded() -> None:
    model, weights = normed()
    x = images(5, 2, 6, 6).float()
    model.show(weights)
    expected = evaluated(model, x)
    seen = list[Tensor]()
    inner = model.module.get_submodule("features.3.1")
    hook = inner.register_forward_hook(lambda *given: seen.append(given[2]))
    torch.testing.assert_close(evaluated(model, x), expected)
    assert len(seen) == 1
    hook.remove()
    evaluated(model, x)
    assert len(seen) == 1


def test_layers_of_a_users_own_are_not_folded() -> None:
    class Doubled(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return 2 * super().forward(input)

    class Absent(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return input

    class Standardized(nn.Conv2d):
        def _conv_forward(
            self,
            input: Tensor,  # noqa: A002
            weight: Tensor,
            bias: Tensor | None,
        ) -> Tensor:
            standard = weight / weight.std()
            found: Tensor = super()._conv_forward(input, standard, bias)
            return found

    x = images(5, 2, 6, 6).float()
    for pair in (
        (Doubled(2, 3, 3), nn.BatchNorm2d(3)),
        (Standardized(2, 3, 3), nn.BatchNorm2d(3)),
        (nn.Conv2d(2, 3, 3), Absent(3)),
        (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)),
    ):
        module = nn.Sequential(*pair).eval()
        expected = module(x)
        use_faster_layers(module)
        assert isinstance(module, FoldingSequential)
        module.fold(True)
        with torch.inference_mode():
            torch.testing.assert_close(module(x), expected)


def test_mobilenet_is_the_same_network() -> None:
    with RandomKey(0).torch():
        plain = import_torchvision().models.mobilenet_v2(num_classes=3)
    other = copy.deepcopy(plain)
    use_faster_layers(other)
    kinds = [type(layer) for layer in other.modules() if isinstance(layer, nn.Conv2d)]
    assert kinds.count(DepthwiseConv2d) == 17
    assert kinds.count(PointwiseConv2d) == 34
    assert [*other.state_dict()] == [*plain.state_dict()]
    x = images(4, 3, 32, 32)
    assert any(isinstance(layer, FoldingSequential) for layer in other.modules())
    found, expected = (results(one.double().eval(), x) for one in (other, plain))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
