"""Files of weights of others: read without running code, matched with a model by name.

A file holds tensors by name, in nested mappings as checkpoints have them. Its names may
have a prefix, and parts that wrappers such as ``DataParallel`` insert.
`knnper.exported_weights` reads the files that this project wrote.
"""

import argparse
import os
import pickle  # noqa: TID251 (the name of an error)
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from knnper.errors import ConfigError, Problem

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
WEIGHTS = "model.safetensors"  # in the folder of an exported model
PLACE = "model.weights"  # place of problems
HEAD = "classifier"  # name of the head in an `EmbeddingModel`
# Parts of names that wrappers insert: torch's data parallelism, compiler and sharding,
# Opacus, and the checkpointing of activations.
_WRAPPERS = frozenset(
    (
        "module",
        "_module",
        "_orig_mod",
        "_forward_module",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
    )
)
_MOST_NESTED = 8  # nested mappings
_MOST_LISTED = 8  # problems of one file, and names in an error
# First bytes of files of torch.save: a zip archive, or a bare pickle of old versions.
_PICKLED = (b"PK\x03\x04", b"\x80")
# A file of safetensors begins with the length of its header in eight bytes, then the
# header, which is JSON.
_LENGTH_BYTES = 8
_HEADER = b"{"


def located(name: str) -> Path:
    """Return the path of a file of weights; ``name`` may be the folder of a model."""
    path = Path(name).expanduser()
    inside = (path / WEIGHTS, path / "model" / WEIGHTS)
    return next(filter(Path.is_file, inside), path) if path.is_dir() else path


def is_file_name(name: str) -> bool:
    """Return whether ``name`` is a file or folder, not a library's name of weights."""
    path = located(name)
    return path.suffix.lower() in SUFFIXES or os.sep in name or path.exists()


def as_names(weights: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in the setting ``model.weights`` as a tuple."""
    if weights is None:
        return ()
    return (weights,) if isinstance(weights, str) else tuple(weights)


@dataclass(frozen=True)
class Leaf:
    """A value in a file that is no mapping."""

    within: str  # names of the mappings around it, each followed by a dot
    value: Any


def read_leaves(path: Path) -> dict[str, Leaf]:
    """Return all values of a file by name, with dots between nested names."""
    content = _content(path)
    if not isinstance(content, Mapping):
        message = (
            f"{path} holds a {type(content).__name__}, expected tensors by name: write "
            "them with torch.save(model.state_dict(), FILE)"
        )
        raise ConfigError([Problem(PLACE, message)])
    return dict(_leaves(content, "", 0))


def _leaves(
    values: Mapping[Any, Any], within: str, depth: int
) -> Iterator[tuple[str, Leaf]]:
    for key, value in values.items():
        name = f"{within}{key}"
        if isinstance(value, Mapping) and depth < _MOST_NESTED:
            yield from _leaves(value, f"{name}.", depth + 1)
        else:
            yield name, Leaf(within, value)


def _content(path: Path) -> object:
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES + 1)
        if start.endswith(_HEADER) or not start.startswith(_PICKLED):
            return load_file(path)
        with torch.serialization.safe_globals(_harmless()):
            content: object = torch.load(path, map_location="cpu", weights_only=True)
        return content
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        message = (
            f"{path} holds an object of {kind[1] if kind else 'a class'}, and "
            "reading it would run code; expected tensors by name: write them with "
            "torch.save(model.state_dict(), FILE)"
        )
        raise ConfigError([Problem(PLACE, message)]) from error
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if "TorchScript" in reason:
            reason = "it is a TorchScript archive, which holds code"
        if isinstance(error, IsADirectoryError):
            reason = (
                f"it is a folder without {WEIGHTS}; if it is a finished run, name the "
                f"folder that `knnper fed export {path} FOLDER` writes"
            )
        message = (
            f"expected a readable file of tensors, of safetensors or torch.save, at "
            f"{path}: {reason}; correct the path, or remove it to start from random "
            "weights"
        )
        raise ConfigError([Problem(PLACE, message)]) from error


def _harmless() -> list[Any]:
    """Return the classes that a pickled file may use: NumPy's numbers, and options."""
    rebuild_array = np.empty(0).__reduce__()[0]
    rebuild_number = np.float64(0).__reduce__()[0]
    kinds = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
    return [
        np.ndarray,
        np.dtype,
        argparse.Namespace,
        rebuild_array,
        rebuild_number,
        *{type(np.dtype(kind)) for kind in kinds},
        # As NumPy before 2 called them.
        (rebuild_array, "numpy.core.multiarray._reconstruct"),
        (rebuild_number, "numpy.core.multiarray.scalar"),
    ]


class ShapeError(ValueError):
    """A tensor of a file has another shape than the model's."""


def as_numbers(value: Any, expected: Tensor) -> Tensor:
    """Return a value of a file as a tensor like ``expected``.

    Raises
    ------
    ShapeError
        If it has another shape.
    ValueError
        If it does not hold plain numbers of the same kind.
    """
    tensor = _as_tensor(value)
    if tensor.shape != expected.shape:
        raise ShapeError(
            f"expected shape {tuple(expected.shape)}, found {tuple(tensor.shape)}"
        )
    # A counter may be a mean over clients, since other systems average all tensors.
    is_mean = tensor.is_floating_point() and not expected.is_floating_point()
    is_alike = tensor.is_floating_point() == expected.is_floating_point()
    if not (is_alike or is_mean) or tensor.is_complex() != expected.is_complex():
        raise ValueError(f"expected {expected.dtype}, found {tensor.dtype}")
    try:
        numbers = tensor.to(torch.float64 if is_mean else expected.dtype)
    except RuntimeError as error:  # types that pack several numbers into a byte
        message = f"expected {expected.dtype}, found {tensor.dtype}: {error}"
        raise ValueError(message) from error
    if not bool(torch.isfinite(numbers).all()):
        raise ValueError("expected finite numbers, found NaN or infinity")
    return numbers.round().to(expected.dtype) if is_mean else numbers


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(value)
    if not isinstance(value, Tensor):
        kind = type(value)
        raise ValueError(
            f"expected a tensor, found a {kind.__module__}.{kind.__name__}"
        )
    if value.is_meta:
        raise ValueError("expected numbers, found a tensor without any (device meta)")
    if value.is_nested:
        raise ValueError("expected a plain tensor, found a nested one")
    plain: Tensor = value.detach()
    if plain.is_quantized:
        plain = plain.dequantize()
    return plain if plain.layout == torch.strided else plain.to_dense()


def load_weights(
    module: nn.Module,
    weights: str | Sequence[str] | None,
    head: str = HEAD,
    published: str = "",
) -> None:
    """Copy the files in the setting ``model.weights`` into ``module``, in turn.

    See `load_tensors`.
    """
    for name in as_names(weights):
        path = located(name)
        load_tensors(module, read_leaves(path), str(path), head, published)


def load_tensors(
    module: nn.Module,
    tensors: Mapping[str, Any],
    source: str,
    head: str,
    published: str = "",
) -> None:
    """Copy named tensors into ``module``.

    The names of the head begin with ``head``, or in the file with ``published``. A head
    that is missing or has another shape, as for other classes, is not loaded. Counters
    of BatchNorm may be missing. Names may have a prefix, and parts of wrappers; tensors
    outside the prefix are ignored.

    Raises `ConfigError` with all tensors that are missing, unknown or do not fit.
    """
    leaves = {
        name: value if isinstance(value, Leaf) else Leaf("", value)
        for name, value in tensors.items()
    }
    state = module.state_dict()
    expected = {
        name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)
    }
    of_head = {name for name in expected if name.startswith(f"{head}.")}
    match = _best_match(expected, leaves, source, head, published)
    loaded, problems = dict[str, Tensor](), list[Problem]()
    for name, tensor in expected.items():
        place = match.names.get(name)
        if place is None:
            if name not in of_head and tensor.is_floating_point():
                problems.append(Problem(name, "the file has no such tensor"))
            continue
        try:
            loaded[name] = as_numbers(leaves[place].value, tensor)
        except ValueError as error:
            if not (name in of_head and isinstance(error, ShapeError)):
                problems.append(Problem(place, str(error)))
    unknown = match.unknown
    if of_head - loaded.keys():  # the head is loaded as a whole or not at all
        loaded = {name: loaded[name] for name in loaded.keys() - of_head}
        heads = tuple(f"{name}." for name in (head, published, HEAD) if name)
        unknown = {
            name: end for name, end in unknown.items() if not end.startswith(heads)
        }
    problems += [
        Problem(name, "the model has no such tensor; is it for another model?")
        for name in sorted(unknown)
    ]
    if problems:
        raise ConfigError(shortened(problems), source=source)
    module.load_state_dict({**state, **loaded})


def shortened(problems: list[Problem]) -> list[Problem]:
    """Return the first problems of a file, and the number of the others."""
    num_left_out = len(problems) - _MOST_LISTED
    if num_left_out <= 1:
        return problems
    message = f"{num_left_out} more tensors do not fit; is it for another model?"
    return [*problems[:_MOST_LISTED], Problem(PLACE, message)]


@dataclass(frozen=True)
class _Match:
    """Names in a file of a model's tensors."""

    prefix: str
    names: Mapping[str, str]  # from the model's names to the file's
    # Further tensors of the file beside these: full names to names without the prefix.
    unknown: Mapping[str, str]


def _best_match(
    expected: Mapping[str, Tensor],
    leaves: Mapping[str, Leaf],
    source: str,
    head: str,
    published: str,
) -> _Match:
    """Return the match with most tensors; reject a file with no match or two."""
    needed = {
        name
        for name, tensor in expected.items()
        if tensor.is_floating_point() and not name.startswith(f"{head}.")
    }
    plain = _plain_names(leaves)
    matches = [
        match
        for dialect in _dialects(expected, head, published)
        for match in _matches(dialect, plain, leaves)
    ]
    if not any(match.names for match in matches):
        message = (
            f"none of the {len(leaves)} names in {source} belongs to the model: found "
            f"{_some(leaves)}, expected {_some(expected)}; is it for another model?"
        )
        raise ConfigError([Problem(PLACE, message)])
    complete = [match for match in matches if needed <= match.names.keys()]
    candidates = complete or matches
    most = max(len(match.names) for match in candidates)
    best = [match for match in candidates if len(match.names) == most]
    first, *others = sorted(best, key=lambda match: len(match.prefix))
    for other in others if complete and first.prefix else ():
        if not _are_equal(first, other, leaves):
            message = (
                f"{source} holds the model's tensors under {first.prefix!r} and "
                f"{other.prefix!r}, expected them once: write one of the two to a "
                "separate file, torch.save(torch.load(FILE)[KEY], OTHER_FILE)"
            )
            raise ConfigError([Problem(PLACE, message)])
    return first


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    ellipsis = ", ..." if len(listed) > _MOST_LISTED // 2 else ""
    return ", ".join(listed[: _MOST_LISTED // 2]) + ellipsis


def _are_equal(match: _Match, other: _Match, leaves: Mapping[str, Leaf]) -> bool:
    pairs = [
        (leaves[match.names[name]].value, leaves[other.names[name]].value)
        for name in match.names.keys() & other.names.keys()
    ]
    are_tensors = all(isinstance(value, Tensor) for pair in pairs for value in pair)
    return are_tensors and all(torch.equal(*pair) for pair in pairs)


def _without_wrappers(name: str) -> str:
    *path, tensor = name.split(".")
    return ".".join([*(part for part in path if part not in _WRAPPERS), tensor])


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map names without the parts of wrappers to names, unless two become equal."""
    names = list(names)
    plain = {_without_wrappers(name): name for name in names}
    return plain if len(plain) == len(names) else {name: name for name in names}


def _dialects(
    expected: Mapping[str, Tensor], head: str, published: str
) -> Iterator[dict[str, str]]:
    """Yield maps from names in a file to the model's, for each known naming scheme.

    The schemes are the network's own names, these with the published name of the head,
    and those of a network split into ``features`` and ``classifier``, as `Run.model`
    returns it.
    """
    plain = _plain_names(expected)
    yield plain
    if published and published != head:
        yield {
            re.sub(rf"^{re.escape(head)}\.", f"{published}.", name): model_name
            for name, model_name in plain.items()
        }
    start = f"{head}." if head else ""
    yield {
        f"{HEAD}.{name.removeprefix(start)}"
        if name.startswith(start)
        else f"features.{name}": model_name
        for name, model_name in plain.items()
    }


def _matches(
    dialect: Mapping[str, str], plain: Mapping[str, str], leaves: Mapping[str, Leaf]
) -> Iterator[_Match]:
    """Yield a match for each prefix of the file's names under which tensors match.

    ``plain``: Maps the file's names without parts of wrappers to its names.
    """
    under: dict[str, dict[str, str]] = {}
    for name, whole in plain.items():
        starts = [0, *(place.end() for place in re.finditer(r"\.", name))]
        for start in starts:
            if name[start:] in dialect:
                under.setdefault(name[:start], {})[dialect[name[start:]]] = whole
    for prefix, names in under.items():
        used = set(names.values())
        beside = {leaves[name].within for name in used}
        yield _Match(
            prefix,
            names,
            {
                whole: name.removeprefix(prefix)
                for name, whole in plain.items()
                if whole not in used
                and name.startswith(prefix)
                and leaves[whole].within in beside
                and isinstance(leaves[whole].value, Tensor | np.ndarray)
            },
        )
