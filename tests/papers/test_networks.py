"""Networks of the experiments."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from knnper import InputSpec
from knnper.process import import_torchvision
from papers.networks import AdaptedMobileNetV2

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("channels", [1, 3])
def test_the_layer_stands_on_the_networks_features(
    tmp_path: Path, channels: int
) -> None:
    published = import_torchvision().models.mobilenet_v2().eval()
    features = published.features.state_dict(prefix="features.")
    save_file(features, tmp_path / "weights.safetensors")
    mean, std = (0.4,) * channels, (0.2,) * channels
    spec = InputSpec((8, 8, channels), 5, mean, std)
    network = AdaptedMobileNetV2(
        5, spec, str(tmp_path / "weights.safetensors"), image_size=32, width=7
    ).eval()

    images = torch.rand(2, channels, 8, 8)
    found = network((images - 0.4) / 0.2)

    large = functional.interpolate(
        images.expand(-1, 3, -1, -1), (32, 32), mode="bilinear", antialias=True
    )
    of_imagenet = torch.stack(
        [
            (large[:, 0] - 0.485) / 0.229,
            (large[:, 1] - 0.456) / 0.224,
            (large[:, 2] - 0.406) / 0.225,
        ],
        dim=1,
    )
    pooled = published.features(of_imagenet).mean(dim=(2, 3))
    layer = next(network.features[-1].children())
    assert isinstance(layer, nn.Linear)
    hidden = (pooled @ layer.weight.T + layer.bias).clamp(min=0)
    assert hidden.shape == (2, 7)
    expected = hidden @ network.head.weight.T + network.head.bias
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
