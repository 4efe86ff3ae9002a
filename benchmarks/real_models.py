"""The models that real clients return as they got them."""

import torch
from torch import Tensor

from knnper.process import import_torchvision

TRIVIAL = "trivial"
MOBILENET_V2 = "mobilenet_v2"


def tensors_of(model: str) -> dict[str, Tensor]:
    """Return the float32 numbers of a model: ten, or 9 MB in more than 200 tensors."""
    if model == TRIVIAL:
        return {"numbers": torch.zeros(10)}
    networks = import_torchvision().models
    state: dict[str, Tensor] = networks.mobilenet_v2(num_classes=10).state_dict()
    return {name: one for name, one in state.items() if one.is_floating_point()}
