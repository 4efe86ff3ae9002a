"""Answers of the service: their documents, and the fields that each scope may see."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from knnper.client.service.tokens import Caller, Scope
from knnper.client.state import Accuracy
from knnper.data.examples import InputDtype
from knnper.datastore.prediction import Prediction
from knnper.datastore.private_memory import PrivateMemory, PrivatePrediction

ByClass = dict[str, float] | None


class Document(BaseModel):
    """Base of every answer."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def hidden_from(cls, caller: Caller) -> dict[str, Any]:
        """Return the fields that the caller's scopes do not include."""
        return {
            name: True
            for name, field in cls.model_fields.items()
            if isinstance(field.json_schema_extra, dict)
            and field.json_schema_extra["x-scope"] not in caller.scopes
        }


def for_scope(scope: Scope, description: str) -> Any:
    """Declare a field that only tokens with ``scope`` receive."""
    extra: dict[str, Any] = {"x-scope": scope}
    return Field(default=None, description=description, json_schema_extra=extra)


class NeighborDocument(Document):
    """A stored example among the nearest."""

    id: int = Field(description="Of the example in the store; never reused.")
    name: str | None = Field(description="The owner's name for it, if there is one.")
    label: int = Field(description="Number of its class.")
    class_name: str = Field(description="Name of its class.")
    distance: float = Field(description="Euclidean, between the embeddings.")
    weight: float = Field(description="Its share of the vote; all sum to 1.")


class InputPrediction(Document):
    """The prediction for one input; fields outside the token's scopes are left out."""

    label: int = Field(description="Number of the most probable class.")
    class_name: str = Field(description="Name of the most probable class.")
    probabilities: ByClass = for_scope(
        "probabilities", "By class: the prediction, λ·p_kNN + (1 - λ)·p_global."
    )
    global_probabilities: ByClass = for_scope(
        "neighbors", "By class: p_global of the global model."
    )
    adapted_probabilities: ByClass = for_scope(
        "neighbors",
        "By class: p_global adapted to the frequencies of the stored classes, used in "
        "place of p_global; null without a class prior.",
    )
    knn_probabilities: ByClass = for_scope(
        "neighbors", "By class: p_kNN of the neighbours; null with an empty store."
    )
    neighbors: list[NeighborDocument] | None = for_scope("neighbors", "Nearest first.")


class Predictions(Document):
    """Predictions for all inputs of a request, from one state of model and store."""

    predictions: list[InputPrediction] = Field(description="One per input, in order.")
    model: str = Field(description="Fingerprint of the model that was used.")
    knn_weight: float | None = for_scope(
        "neighbors", "λ as it was used: 0 with an empty store."
    )
    num_stored: int | None = for_scope(
        "neighbors", "Examples in the store that was searched."
    )


class StoredExample(Document):
    """The outcome for one example that was sent."""

    id: int | None = Field(description="In the store; null if it was not kept.")
    kept: bool = Field(description="Whether the store's policy kept it.")


class Addition(Document):
    """The outcome of an addition; the examples are on disk."""

    examples: list[StoredExample] = Field(description="One each, in order.")
    evicted: list[int] = Field(description="Ids of the examples that made room.")
    num_stored: int = Field(description="Examples in the store afterwards.")


class Deletion(Document):
    """The outcome of a deletion; the examples are never found again."""

    deleted: list[int] = Field(description="Ids of the examples.")
    erased: bool = Field(
        description="Whether no byte of them is left in the store's files."
    )
    message: str | None = Field(
        description="Why some bytes may be left, and until when."
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
    capacity: int | None = Field(description="At most; null is unbounded.")
    policy: str = Field(description="Which examples stay when new examples arrive.")
    index: str = Field(description="How the nearest are found.")
    num_by_class: dict[str, int] = Field(description="Examples of each class.")


class PrivacyInfo(Document):
    """The privacy of the answers; fields outside the token's scopes are left out."""

    epsilon: float = Field(
        description="ε of every stored example, over all answers ever given to "
        "everyone but the owner. It covers neither the global model nor the time that "
        "an answer takes."
    )
    delta: float = Field(description="δ.")
    knn_weight: float = Field(description="λ, the weight of the vote.")
    share_voting: float | None = for_scope(
        "read", "Fraction of the stored examples that can still vote."
    )


class Info(Document):
    """The model that is served; fields outside the token's scopes are left out."""

    client: str = Field(description="The client's name.")
    version: str = Field(description="Of this software.")
    token: str = Field(description="Name of the token of this request.")
    scopes: list[str] = Field(description="Scopes of the token.")
    model: str = Field(description="Fingerprint of the model that is served.")
    class_names: list[str] = Field(description="In the order of their numbers.")
    input_shape: list[int] = Field(description="How an input's lists are nested.")
    input_type: InputDtype = Field(
        description="Of the numbers in an input; token: ids of characters."
    )
    feature_names: list[str] = Field(
        description="Of the numbers in an input, in order; empty where it has no names."
    )
    takes_pictures: bool = Field(description="Whether PNG and JPEG files are taken.")
    takes_text: bool = Field(description="Whether text is taken.")
    knn_weight: float | None = for_scope(
        "neighbors", "λ, the weight of the neighbours."
    )
    num_neighbors: int | None = for_scope(
        "neighbors", "k, the number of neighbours that vote."
    )
    kernel: str | None = for_scope("neighbors", "How a neighbour's distance counts.")
    kernel_scale: float | None = for_scope(
        "neighbors", "The scale of the distances, sigma."
    )
    class_prior: bool | None = for_scope(
        "neighbors",
        "Whether the global model is adapted to the frequencies of the stored classes.",
    )
    accuracy: Accuracy | None = for_scope("neighbors", "As measured when λ was chosen.")
    store: StoreInfo | None = for_scope("read", "The client's memory.")
    privacy: PrivacyInfo | None = Field(
        default=None, description="Of private answers; absent where they are exact."
    )


def privacy_of(memory: PrivateMemory) -> PrivacyInfo:
    """Describe the privacy of a memory's answers."""
    settings = memory.settings
    return PrivacyInfo(
        epsilon=settings.epsilon,
        delta=settings.delta,
        knn_weight=settings.knn_weight,
        share_voting=memory.share_voting(),
    )


def predictions_of(prediction: Prediction, class_names: Sequence[str]) -> Predictions:
    """Build the document of the predictions for n inputs."""
    vote = prediction.vote
    near = prediction.vote.neighbors
    names = near.names or [[None] * near.ids.shape[1]] * len(near.ids)
    labels: list[int] = prediction.labels.tolist()

    def by_class(probabilities: Tensor | None) -> Sequence[ByClass]:
        if probabilities is None:
            return [None] * len(labels)
        return [
            dict(zip(class_names, row, strict=True)) for row in probabilities.tolist()
        ]

    # `model_construct` skips validation, which would take longer than the prediction.
    neighbors = [
        [
            NeighborDocument.model_construct(
                id=number,
                name=name,
                label=label,
                class_name=class_names[label],
                distance=distance,
                weight=weight,
            )
            for number, name, label, distance, weight in zip(*columns, strict=True)
        ]
        for columns in zip(
            near.ids.tolist(),
            names,
            near.labels.tolist(),
            near.squared_distances.sqrt().tolist(),
            vote.weights.tolist(),
            strict=True,
        )
    ]
    rows = zip(
        labels,
        by_class(prediction.probabilities),
        by_class(prediction.global_probabilities),
        by_class(prediction.adapted_probabilities),
        by_class(vote.probabilities),
        neighbors,
        strict=True,
    )
    return Predictions.model_construct(
        predictions=[
            InputPrediction.model_construct(
                label=label,
                class_name=class_names[label],
                probabilities=p_mixed,
                global_probabilities=p_global,
                adapted_probabilities=p_adapted,
                knn_probabilities=p_knn,
                neighbors=nearest,
            )
            for label, p_mixed, p_global, p_adapted, p_knn, nearest in rows
        ],
        model=near.fingerprint,
        knn_weight=prediction.knn_weight,
        num_stored=vote.num_stored,
    )


def private_predictions_of(
    prediction: PrivatePrediction, class_names: Sequence[str]
) -> Predictions:
    """Build the document of private predictions for n inputs."""
    labels: list[int] = prediction.labels.tolist()
    rows = prediction.probabilities.tolist()
    return Predictions(
        predictions=[
            InputPrediction(
                label=label,
                class_name=class_names[label],
                probabilities=dict(zip(class_names, row, strict=True)),
            )
            for label, row in zip(labels, rows, strict=True)
        ],
        model=prediction.fingerprint,
    )


def as_json(caller: Caller, answer: Predictions) -> str:
    """Serialize predictions without the fields that the caller may not see."""
    hidden_in_each = {"__all__": InputPrediction.hidden_from(caller)}
    return answer.model_dump_json(
        exclude=Predictions.hidden_from(caller) | {"predictions": hidden_in_each}
    )


def info_as_json(caller: Caller, info: Info) -> str:
    """Serialize the description without the fields that the caller may not see."""
    hidden = Info.hidden_from(caller)
    hidden["privacy"] = PrivacyInfo.hidden_from(caller) if info.privacy else True
    return info.model_dump_json(exclude=hidden)
