"""A global model as a folder of two files, which needs neither network nor data."""

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from knnper.durable_files import sync_folder, write_atomically
from knnper.transport.model_folder.card import CARD, ModelCard
from knnper.transport.model_folder.errors import ModelError
from knnper.transport.model_folder.global_model import (
    GlobalModel,
    model_of_card,
    require_fingerprint,
)

FORMAT = 1
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
_TENSOR = "weights"


def is_model_folder(folder: Path) -> bool:
    """Return whether ``folder`` is, or should be, a model's."""
    return (folder / DESCRIPTION).is_file()


def save_model(folder: Path, model: GlobalModel) -> None:
    """Write ``model`` to ``folder``: complete on disk, or not there, at any time.

    Where the very same model is there already, nothing is done.

    Raises
    ------
    ModelError
        If the folder holds something else.
    """
    if folder.exists():
        _require_same(folder, model)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{uuid4().hex}.draft")
    try:
        draft.mkdir()
        weights = {_TENSOR: model.weights.contiguous()}
        write_atomically(draft / WEIGHTS, save(weights))
        write_atomically(draft / DESCRIPTION, _described(model))
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder.parent)


def load_model(folder: Path) -> GlobalModel:
    """Return the model in ``folder``, verified by its fingerprint.

    Raises
    ------
    ModelError
        If there is none, it is damaged, or another version made it.
    """
    card, expected = _card(folder)
    path = folder / WEIGHTS
    try:
        weights = load_file(path)[_TENSOR]
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); export the model again"
        ) from error
    # The layout in memory shows in the last bits of products.
    copied = weights.clone(memory_format=torch.contiguous_format)
    model = model_of_card(card, copied)
    require_fingerprint(model, expected, str(folder))
    return model


def _described(model: GlobalModel) -> str:
    document = {
        "format": FORMAT,
        "fingerprint": model.fingerprint,
        "card": CARD.dump_python(model.card, mode="json"),
    }
    return json.dumps(document, indent=2)


def _card(folder: Path) -> tuple[ModelCard, str]:
    document = _document(folder / DESCRIPTION)
    found = document.get("format")
    if found != FORMAT:
        raise ModelError(
            f"{folder} is a model of format {found}, expected {FORMAT}; use the "
            "version of this software that exported it, or export it again"
        )
    try:
        card = CARD.validate_json(json.dumps(document["card"]))
        return card, str(document["fingerprint"])
    except (KeyError, ValidationError) as error:
        raise ModelError(
            f"{folder / DESCRIPTION} is not what this version of the software writes "
            f"({error}); export the model again"
        ) from error


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} holds no model: {path.name} is missing. Give the folder "
            "that knnper export wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); export the model again"
        ) from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} is no JSON object; export the model again")
    return document


def _require_same(folder: Path, model: GlobalModel) -> None:
    if not is_model_folder(folder):
        raise ModelError(
            f"{folder} exists and holds no model; give a new folder for the model"
        )
    found = load_model(folder).fingerprint
    if found != model.fingerprint:
        raise ModelError(
            f"{folder} holds the model {found[:12]}, expected to write "
            f"{model.fingerprint[:12]}; give another folder"
        )
