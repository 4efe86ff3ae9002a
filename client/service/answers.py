"""From predictions to the documents that are answered."""

from collections.abc import Sequence

from torch import Tensor

from client.service.documents import (
    InputPrediction,
    NeighborDocument,
    Predictions,
)
from client.service.served import Prediction


def class_names_of(names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Return a name for each class: its number where there are no names."""
    return tuple(names) or tuple(str(number) for number in range(num_classes))


def predictions(prediction: Prediction, class_names: Sequence[str]) -> Predictions:
    """Return the document of predictions for n inputs.

    Parameters
    ----------
    prediction
        For n inputs.
    class_names
        One for each class.
    """
    neighbors = _neighbors(prediction, class_names)
    mixed = _by_class(prediction.probabilities, class_names)
    of_model = _by_class(prediction.global_probabilities, class_names)
    labels: list[int] = prediction.labels.tolist()
    adapted, of_neighbors = (
        [None] * len(labels) if one is None else _by_class(one, class_names)
        for one in (prediction.adapted_probabilities, prediction.knn_probabilities)
    )
    # Made of our own numbers, which need not be validated one by one.
    return Predictions.model_construct(
        predictions=[
            InputPrediction.model_construct(
                label=label,
                class_name=class_names[label],
                probabilities=mixed[row],
                global_probabilities=of_model[row],
                adapted_probabilities=adapted[row],
                knn_probabilities=of_neighbors[row],
                neighbors=neighbors[row],
            )
            for row, label in enumerate(labels)
        ],
        knn_weight=prediction.knn_weight,
        model=prediction.fingerprint,
        num_stored=prediction.num_stored,
    )


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
