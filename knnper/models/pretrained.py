"""Starting from the weights in a local file."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from knnper.config.errors import ConfigError, Problem
from knnper.models.base import EmbeddingModel


def load_weights(module: EmbeddingModel, path: Path) -> None:
    """Copy the tensors of a ``.safetensors`` file into ``module``.

    The head is left as it is when the file has none or one of another shape: it was
    made for other classes. BatchNorm's counters may be missing.

    Parameters
    ----------
    module
        The model, freshly initialised.
    path
        The file; its tensors are named as in ``module.state_dict()``, and those of the
        head so or by `EmbeddingModel.published_head`.

    Raises
    ------
    ConfigError
        If the file cannot be read, or does not fit the model outside the head.
    """
    found = _with_own_head(_read(path), module.published_head)
    expected = module.state_dict()
    if _head_differs(expected, found):
        found = _without_head(found)
        needed = _without_head(expected)
    else:
        needed = expected
    problems = [*_misfits(needed, found), *_unknown(expected, found)]
    if problems:
        raise ConfigError(problems, source=str(path))
    module.load_state_dict({**expected, **found})


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        message = (
            f"expected a readable .safetensors file at {path}: {error}; correct the "
            "path, or leave it out to start from random weights"
        )
        raise ConfigError([Problem("model.weights", message)]) from error


def _with_own_head(tensors: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """Return the tensors with those of the head called ``classifier``."""
    return {
        f"classifier.{name.removeprefix(f'{head}.')}"
        if name.startswith(f"{head}.")
        else name: tensor
        for name, tensor in tensors.items()
    }


def _head_differs(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> bool:
    head = expected.keys() - _without_head(expected).keys()
    return any(
        name not in found or found[name].shape != expected[name].shape for name in head
    )


def _without_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("classifier.")
    }


def _misfits(
    needed: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Iterator[Problem]:
    for name, tensor in needed.items():
        if name in found:
            message = _misfit(tensor, found[name])
        else:
            is_counter = not tensor.is_floating_point()
            message = None if is_counter else "the file has no such tensor"
        if message is not None:
            yield Problem(name, message)


def _misfit(wanted: Tensor, given: Tensor) -> str | None:
    """Return what is wrong with one tensor of the file, or None."""
    if wanted.shape != given.shape:
        return f"expected shape {tuple(wanted.shape)}, found {tuple(given.shape)}"
    if not bool(torch.isfinite(given).all()):
        return "expected finite numbers, found NaN or infinity"
    return None


def _unknown(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Iterator[Problem]:
    for name in sorted(found.keys() - expected.keys()):
        yield Problem(name, "the model has no such tensor; is it for another model?")
