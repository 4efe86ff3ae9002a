"""The user's model of a `LocalMemory`: checked, copied and fingerprinted."""

import copy
import hashlib

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError, Problem

NO_MODEL = "none"
"""Fingerprint of a memory without a model."""


def copy_model(model: nn.Module | None) -> nn.Module | None:
    """Copy a user's model, in evaluation mode; raise ConfigError if it is unusable."""
    if model is None:
        return None
    if not isinstance(model, nn.Module):
        type_name = type(model).__name__
        message = f"found a {type_name}, expected a torch.nn.Module, or None"
        raise ConfigError([Problem("model", message)], "LocalMemory")
    network = _unwrap(model)
    if reason := _model_problem(network):
        raise ConfigError([Problem("model", reason)], "LocalMemory")
    # A forward pass may leave tensors in the network, as the old weight_norm does. They
    # belong to an autograd graph, and deepcopy would fail on them.
    attributes = (
        value for module in network.modules() for value in vars(module).values()
    )
    known = {
        id(value): value.detach().clone()
        for value in attributes
        if isinstance(value, Tensor) and not value.is_leaf
    }
    copied: nn.Module = copy.deepcopy(network, known)
    return copied.eval()


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside the wrappers of torch.compile and DataParallel."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, parallel) or hasattr(model, "_orig_mod"):
        name = "module" if isinstance(model, parallel) else "_orig_mod"
        model = model.get_submodule(name)
    return model


def _model_problem(network: nn.Module) -> str:
    """Explain why a network cannot be the model of a memory; empty if it can."""
    instead = "give the network from which it was made"
    for path, module in network.named_modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        if is_scripted and not isinstance(network, EmbeddingModel):
            where = f" as its layer {path!r}" if path else ""
            return (
                f"found a {type(module).__name__}{where}, which gives no access to its "
                f"layers; {instead}"
            )
    tensors = [*network.named_parameters(), *network.named_buffers()]
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        return (
            f"found the parameter {lazy!r} of a lazy layer, which has no shape yet; "
            "run the network once on an input first"
        )
    for name, value in network.state_dict().items():
        if not _is_plain(value):
            return (
                f"found {name!r}, which is no plain tensor of numbers (it is sparse, "
                f"quantised, without values or no tensor); {instead}"
            )
    return ""


def _is_plain(value: object) -> bool:
    """Return whether a value is a dense tensor with its numbers in memory."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def fingerprint_model(model: nn.Module | None) -> str:
    """Return a SHA-256, in hexadecimal, of the names and bits of all tensors."""
    if model is None:
        return NO_MODEL
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().flatten()
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
