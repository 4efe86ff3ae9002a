"""An experiment as plain values, and back."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from knnper.config.catalogue import Catalogue
from knnper.config.errors import ConfigError, Problem
from knnper.config.loading import load_experiment
from knnper.config.sections import Choice, Experiment, RunSettings, Settings
from knnper.config.yaml_text import dump_yaml

_NUMERIC = (
    "seed",
    "max_failed_fraction",
    "max_update_norm_ratio",
    "threads_per_worker",
    "evaluation_batch_size",
)
# As far as it is not the default: runs that began before there was such a setting stay
# the runs that they are.
_NUMERIC_UNLESS_DEFAULT = ("max_update_median_ratio",)


def to_document(experiment: Experiment) -> dict[str, Any]:
    """Return every setting of ``experiment``, defaults too, as plain values.

    The result can be written as YAML or JSON; `load_experiment` makes the same
    experiment of it.
    """
    return {
        "name": experiment.name,
        "data": _choice(experiment.data),
        "partition": _choice(experiment.partition),
        "model": _choice(experiment.model),
        "training": _plain(experiment.training),
        "method": _choice(experiment.method),
        "personalization": _choice(experiment.personalization),
        "run": _plain(experiment.run),
    }


def to_yaml(experiment: Experiment) -> str:
    """Return ``experiment`` as the text of an experiment file."""
    return dump_yaml(to_document(experiment))


def to_json(experiment: Experiment) -> str:
    """Return ``experiment`` as one line of JSON."""
    return json.dumps(to_document(experiment))


def from_json(
    text: str,
    catalogue: Catalogue,
    overrides: Sequence[str] = (),
    source: str = "experiment",
) -> Experiment:
    """Return the experiment of which `to_json` made ``text``.

    Parameters
    ----------
    text
        JSON.
    catalogue, overrides, source
        See `load_experiment`.

    Raises
    ------
    ConfigError
        If the text is no JSON, and as `load_experiment`.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([Problem("document", f"no JSON: {error}")], source) from error
    return load_experiment(document, catalogue, overrides, source)


def results_identity(experiment: Experiment) -> str:
    """Return a SHA-256, in hexadecimal, of all that the results depend on.

    Of the section ``run`` that is the seed, what makes an update or a round count as
    failed, and the threads, batches and kind of device by which sums are made. Two
    experiments with the same identity end with the same numbers, whatever they are
    called and wherever they run.
    """
    relevant = relevant_settings(experiment)
    run = relevant.pop("run")
    text = json.dumps([run, relevant], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def relevant_settings(experiment: Experiment) -> dict[str, Any]:
    """Return what `results_identity` is made of, as plain values by section."""
    document = to_document(experiment)
    run = {name: document["run"][name] for name in _NUMERIC}
    for name in _NUMERIC_UNLESS_DEFAULT:
        if document["run"][name] != getattr(RunSettings, name):
            run[name] = document["run"][name]
    run["gpu"] = experiment.run.gpus_per_client > 0
    relevant = {key: document[key] for key in document if key not in ("name", "run")}
    return {**relevant, "run": run}


def dotted(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no mapping, with its dotted key behind ``place``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def _choice(choice: Choice[Settings]) -> dict[str, Any]:
    return {"name": choice.name, **_plain(choice.settings)}


def _plain(settings: Settings) -> dict[str, Any]:
    plain: dict[str, Any] = to_jsonable_python(settings)
    return plain
