"""What the service answers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
    """The prediction for one input."""

    label: int = Field(description="Number of the most probable class.")
    class_name: str = Field(description="Name of the most probable class.")
    probabilities: dict[str, float] = Field(
        description="By class: what is predicted, λ·p_kNN + (1 - λ)·p_global."
    )
    global_probabilities: dict[str, float] = Field(
        description="By class: what the global model says."
    )
    adapted_probabilities: dict[str, float] | None = Field(
        description="By class: what the global model says, given how often each class "
        "is stored; it is p_global where there is such a class prior, else null."
    )
    knn_probabilities: dict[str, float] | None = Field(
        description="By class: what the neighbours say; null where none are stored."
    )
    neighbors: list[NeighborDocument] = Field(description="Nearest first.")


class Predictions(Document):
    """Predictions for all inputs of a request, from one state of model and store."""

    predictions: list[InputPrediction] = Field(description="One an input, in order.")
    knn_weight: float = Field(description="λ as it was used: 0 with an empty store.")
    model: str = Field(description="Fingerprint of the model that was used.")
    num_stored: int = Field(description="Examples in the store that was searched.")


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


class AccuracyInfo(Document):
    """Shares of examples that were predicted rightly."""

    global_model: float | None = Field(description="Of the global model alone.")
    knn: float | None = Field(description="Of the neighbours alone.")
    mixed: float | None = Field(description="Of what is served.")
    num_examples: int | None = Field(description="On how many that was measured.")
    measured_on: str | None = Field(description="On which examples.")


class Info(Document):
    """What is served."""

    client: str = Field(description="The client's name.")
    version: str = Field(description="Of this software.")
    model: str = Field(description="Fingerprint of the model that is served.")
    class_names: list[str] = Field(description="In the order of their numbers.")
    input_shape: list[int] = Field(description="How an input's lists are nested.")
    input_type: Literal["uint8", "float32", "int64", "token"] = Field(
        description="Of the numbers in an input; token: ids of characters."
    )
    takes_pictures: bool = Field(description="Whether PNG and JPEG files are taken.")
    takes_text: bool = Field(description="Whether text is taken.")
    knn_weight: float = Field(description="λ, the weight of the neighbours.")
    num_neighbors: int = Field(description="k, how many neighbours have a say.")
    kernel: str = Field(description="How a neighbour's distance counts.")
    kernel_scale: float = Field(description="The scale of the distances, sigma.")
    class_prior: bool = Field(
        description="Whether the global model is adapted to how often each class is "
        "stored."
    )
    accuracy: AccuracyInfo = Field(description="As measured when λ was chosen.")
    store: StoreInfo = Field(description="The client's memory.")
