"""What a client serves, as it is written down."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from client.residence.errors import ResidenceError
from datastore.prediction.class_prior import ClassPrior
from datastore.prediction.kernel import KernelName
from datastore.tuning.settings import EvidenceKind
from knnper.durable_files import write_atomically

MeasuredOn = Literal["test", "validation", "leave_one_out"]
"""``test``: the test split. The other two look each example up among all others that
are stored, with a choice that was made without it: the validation split's, or all."""


@dataclass(frozen=True)
class Accuracy:
    """Shares of a site's examples that were predicted rightly; None is not known.

    Attributes
    ----------
    global_model
        Of the global model alone.
    knn
        Of the neighbours alone.
    mixed
        Of both, as they are served.
    num_examples, measured_on
        On how many, and on which.
    """

    global_model: float | None = None
    knn: float | None = None
    mixed: float | None = None
    num_examples: int | None = None
    measured_on: MeasuredOn | None = None


@dataclass(frozen=True)
class Gain:
    """What the memory adds to the global model's accuracy, as far as can be known.

    Attributes
    ----------
    expected
        Accuracy of what is served less that of the global model; None is not known.
    margin
        Half the width of its interval of 95 % (Agresti and Min, "Simple improved
        confidence intervals for comparing matched proportions", 2005).
    num_examples
        On how many it was measured.
    """

    expected: float | None = None
    margin: float | None = None
    num_examples: int = 0


@dataclass(frozen=True)
class TunedOn:
    """On what λ, k, σ and the class prior were chosen.

    Attributes
    ----------
    evidence
        See `datastore.tuning.settings.TuningSettings`.
    num_examples
        On how many; 0 where nothing could be scored.
    overruled
        Whether the choice is not served, since it was found to lose.
    """

    evidence: EvidenceKind
    num_examples: int
    overruled: bool = False


@dataclass(frozen=True)
class Serving:
    """A model, and how a client mixes it with its memory.

    Attributes
    ----------
    model
        Fingerprint of the global model.
    knn_weight, num_neighbors, kernel, kernel_scale
        λ, k, the kernel's name and σ.
    tuned_on
        How they were chosen.
    accuracy
        What was measured.
    expected_gain
        Over the global model.
    num_train, num_validation, num_test
        The site's examples when this was installed.
    run
        Name of the experiment that trained the model.
    installed
        Seconds since 1970 (UTC).
    previous
        Fingerprint of the model that was served before; None of the first.
    class_prior
        How the global model is adapted to the labels that are stored; None is not.
    format
        Of the file.
    """

    model: str
    knn_weight: float
    num_neighbors: int
    kernel: KernelName
    kernel_scale: float
    tuned_on: TunedOn
    accuracy: Accuracy
    expected_gain: Gain
    num_train: int
    num_validation: int
    num_test: int
    run: str
    installed: float
    previous: str | None = None
    class_prior: ClassPrior | None = None
    format: Literal[1] = 1


_SERVING = TypeAdapter(Serving)


def read_serving(path: Path) -> Serving | None:
    """Return what the file says; None without a file.

    Raises
    ------
    ResidenceError
        If it says something else.
    """
    try:
        return _SERVING.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ResidenceError(
            f"{path} is damaged or of another version ({error.error_count()} problems"
            "); remove it, and get the model again: knnper onboard"
        ) from error


def write_serving(path: Path, serving: Serving) -> None:
    """Write it down, atomically."""
    write_atomically(path, _SERVING.dump_json(serving, indent=2))
