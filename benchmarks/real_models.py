"""The models echoed by real clients."""

import torch
from torch import Tensor

from knnper.process import import_torchvision

TRIVIAL = "trivial"
MOBILENET_V2 = "mobilenet_v2"


def tensors_of(model: str) -> dict[str, Tensor]:
    """Return the float32 tensors of a model of ten numbers, or of 9 MB."""
    if model == TRIVIAL:
        return {"numbers": torch.zeros(10)}
    networks = import_torchvision().models
    state: dict[str, Tensor] = networks.mobilenet_v2(num_classes=10).state_dict()
    return {
        name: tensor for name, tensor in state.items() if tensor.is_floating_point()
    }
