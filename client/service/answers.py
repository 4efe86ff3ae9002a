"""What the service answers."""

import io
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

import knnper
from client.residence.mixture import Prediction
from client.residence.served_model import ServedModel
from client.residence.serving import Accuracy
from client.service.access import SCOPES, Caller
from client.service.inputs import Reader


class Document(BaseModel):
    """Base of every answer."""

    model_config = ConfigDict(extra="forbid")


class NeighborDocument(Document):
    """A stored example that had a say."""

    id: int = Field(description="Of the example in the store; never given twice.")
    name: str | None = Field(description="The owner's name for it, if there is one.")
    label: int = Field(description="Number of its class.")
    class_name: str = Field(description="Name of its class.")
    distance: float = Field(description="Euclidean, between the embeddings.")
    weight: float = Field(description="Its share of the vote; all sum to 1.")


class InputPrediction(Document):
    """The prediction for one input; what the token's scopes do not give is left out."""

    label: int = Field(description="Number of the most probable class.")
    class_name: str = Field(description="Name of the most probable class.")
    probabilities: dict[str, float] | None = Field(
        default=None,
        description="By class: what is predicted, λ·p_kNN + (1 - λ)·p_global. From "
        "here on for the scope probabilities.",
    )
    global_probabilities: dict[str, float] | None = Field(
        default=None,
        description="By class: what the global model says. From here on for the scope "
        "neighbors.",
    )
    adapted_probabilities: dict[str, float] | None = Field(
        default=None,
        description="By class: what the global model says, given how often each class "
        "is stored; it is p_global where there is such a class prior, else null.",
    )
    knn_probabilities: dict[str, float] | None = Field(
        default=None,
        description="By class: what the neighbours say; null where none are stored.",
    )
    neighbors: list[NeighborDocument] | None = Field(
        default=None, description="Nearest first."
    )


class Predictions(Document):
    """Predictions for all inputs of a request, from one state of model and store."""

    predictions: list[InputPrediction] = Field(description="One an input, in order.")
    model: str = Field(description="Fingerprint of the model that was used.")
    knn_weight: float | None = Field(
        default=None,
        description="λ as it was used: 0 with an empty store. From here on for the "
        "scope neighbors.",
    )
    num_stored: int | None = Field(
        default=None, description="Examples in the store that was searched."
    )


class StoredExample(Document):
    """What became of one example that was sent."""

    id: int | None = Field(description="In the store; null if it was not kept.")
    kept: bool = Field(description="Whether the store's policy kept it.")


class Addition(Document):
    """What became of the examples; they are on disk."""

    examples: list[StoredExample] = Field(description="One each, in order.")
    evicted: list[int] = Field(description="Ids of those that made room.")
    num_stored: int = Field(description="Examples in the store afterwards.")


class Deletion(Document):
    """What was deleted; it is never found again."""

    deleted: list[int] = Field(description="Ids of the examples.")
    erased: bool = Field(
        description="Whether no byte of them is left in the store's files."
    )
    message: str | None = Field(
        description="Why some bytes may be left, and till when."
    )
    num_stored: int = Field(description="Examples in the store afterwards.")


class Health(Document):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(Document):
    """The service predicts."""

    status: Literal["ready"] = "ready"
    model: str = Field(description="Fingerprint of the model that is served.")


class StoreInfo(Document):
    """The client's memory."""

    num_stored: int = Field(description="Examples.")
    capacity: int | None = Field(description="The most; null is not bounded.")
    policy: str = Field(description="What stays when new examples arrive.")
    index: str = Field(description="How the nearest are found.")
    num_by_class: dict[str, int] = Field(description="Examples of each class.")


class Info(Document):
    """What is served; what the token's scopes do not give is left out."""

    client: str = Field(description="The client's name.")
    version: str = Field(description="Of this software.")
    token: str = Field(description="The name of the token that asks.")
    scopes: list[str] = Field(description="What it may.")
    model: str = Field(description="Fingerprint of the model that is served.")
    class_names: list[str] = Field(description="In the order of their numbers.")
    input_shape: list[int] = Field(description="How an input's lists are nested.")
    input_type: Literal["uint8", "float32", "int64", "token"] = Field(
        description="Of the numbers in an input; token: ids of characters."
    )
    takes_pictures: bool = Field(description="Whether PNG and JPEG files are taken.")
    takes_text: bool = Field(description="Whether text is taken.")
    knn_weight: float | None = Field(
        default=None,
        description="λ, the weight of the neighbours. From here on for the scope "
        "neighbors.",
    )
    num_neighbors: int | None = Field(
        default=None, description="k, how many neighbours have a say."
    )
    kernel: str | None = Field(
        default=None, description="How a neighbour's distance counts."
    )
    kernel_scale: float | None = Field(
        default=None, description="The scale of the distances, sigma."
    )
    class_prior: bool | None = Field(
        default=None,
        description="Whether the global model is adapted to how often each class is "
        "stored.",
    )
    accuracy: Accuracy | None = Field(
        default=None, description="As measured when λ was chosen."
    )
    store: StoreInfo | None = Field(
        default=None, description="The client's memory, for the scope read."
    )


def predictions(
    prediction: Prediction, class_names: Sequence[str], caller: Caller
) -> Predictions:
    """Return the document of predictions for n inputs, as far as the caller may see."""
    labels: list[int] = prediction.labels.tolist()
    columns: dict[str, Sequence[object]] = {
        "label": labels,
        "class_name": [class_names[label] for label in labels],
    }
    if caller.may("probabilities"):
        columns["probabilities"] = _by_class(prediction.probabilities, class_names)
    explained = caller.may("neighbors")
    if explained:
        columns |= {
            name: [None] * len(labels) if one is None else _by_class(one, class_names)
            for name, one in (
                ("global_probabilities", prediction.global_probabilities),
                ("adapted_probabilities", prediction.adapted_probabilities),
                ("knn_probabilities", prediction.knn_probabilities),
            )
        }
        columns["neighbors"] = _neighbors(prediction, class_names)
    rows = zip(*columns.values(), strict=True)
    # Made of our own numbers, which need not be validated one by one.
    each = [
        InputPrediction.model_construct(**dict(zip(columns, row, strict=True)))
        for row in rows
    ]
    found = Predictions.model_construct(predictions=each, model=prediction.fingerprint)
    if explained:
        found.knn_weight = prediction.knn_weight
        found.num_stored = prediction.num_stored
    return found


def info(client_name: str, served: ServedModel, reader: Reader, caller: Caller) -> Info:
    """Return what is served, as far as the caller may see."""
    found = Info(
        client=client_name,
        version=knnper.__version__,
        token=caller.name,
        scopes=[scope for scope in SCOPES if caller.may(scope)],
        model=served.model.fingerprint,
        class_names=list(reader.class_names),
        input_shape=list(reader.sent_shape),
        input_type=reader.spec.dtype,
        takes_pictures=reader.takes_pictures,
        takes_text=reader.takes_text,
    )
    if caller.may("neighbors"):
        serving = served.serving
        found.knn_weight, found.num_neighbors = (
            serving.knn_weight,
            serving.num_neighbors,
        )
        found.kernel, found.kernel_scale = serving.kernel, serving.kernel_scale
        found.class_prior = serving.class_prior is not None
        found.accuracy = serving.accuracy
    if caller.may("read"):
        store, contents = served.store, served.store.contents()
        counts = np.bincount(contents.labels, minlength=len(reader.class_names))
        found.store = StoreInfo(
            num_stored=len(contents),
            capacity=store.capacity,
            policy=store.settings.policy,
            index=store.settings.index.name,
            num_by_class=dict(zip(reader.class_names, counts.tolist(), strict=True)),
        )
    return found


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG file of pixels, uint8 of shape (height, width, 1 or 3)."""
    file = io.BytesIO()
    flat = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    Image.fromarray(np.ascontiguousarray(flat)).save(file, "PNG")
    return file.getvalue()


def _by_class(probabilities: Tensor, names: Sequence[str]) -> list[dict[str, float]]:
    return [dict(zip(names, row, strict=True)) for row in probabilities.tolist()]


def _neighbors(
    prediction: Prediction, class_names: Sequence[str]
) -> list[list[NeighborDocument]]:
    found = prediction.neighbors
    columns = zip(
        found.ids.tolist(),
        found.labels.tolist(),
        found.squared_distances.sqrt().tolist(),
        prediction.neighbor_weights.tolist(),
        prediction.neighbor_names,
        strict=True,
    )
    return [
        [
            NeighborDocument.model_construct(
                id=number,
                name=name,
                label=label,
                class_name=class_names[label],
                distance=distance,
                weight=weight,
            )
            for number, label, distance, weight, name in zip(*row, strict=True)
        ]
        for row in columns
    ]
