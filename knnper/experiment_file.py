"""The file of an experiment: how it is read, checked and written."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knnper.errors import ConfigError, Problem
from knnper.experiment import (
    SECTIONS,
    BufferedTiming,
    Experiment,
    MultiStepSchedule,
    RunSettings,
    SgdSettings,
    TrainingSettings,
    UniformSelection,
)
from knnper.files import parse_json
from knnper.privacy_settings import PrivacySettings
from knnper.settings import (
    Choice,
    OpenOwn,
    SectionReader,
    Settings,
    SettingsTypes,
    alternatives,
    apply_overrides,
    dotted,
    is_name,
    is_reference,
    parse_overrides,
    plain,
    shown,
    with_overrides,
)
from knnper.yaml_text import dump_yaml, read_yaml

# Keys that only one kind of file has. A file is of the first kind with such a key.
_KIND_KEYS: Mapping[str, Collection[str]] = {
    "comparison": ("rows", "extends"),
    "sweep": ("random", "variants", "grid"),
    "experiment": ("method", "partition"),
}
_COMMANDS = {"comparison": "compare", "sweep": "sweep", "experiment": "simulate"}
# Advice for turning an experiment into a file of the expected kind.
_FROM_AN_EXPERIMENT = {
    "sweep": "name it in a sweep, experiment: FILE, with what to vary, as in grid: "
    "{training.learning_rate: [0.01, 0.1]}",
    "comparison": "put its data, partition, model and training into the section base "
    "of a comparison and each method into rows; knnper init FOLDER --compare makes one "
    "to start from",
}
# Settings in the section ``run`` on which results depend.
_RUN_SETTINGS_OF_RESULTS = (
    "seed",
    "max_failed_fraction",
    "max_update_norm_ratio",
    "max_update_median_ratio",
    "threads_per_worker",
    "evaluation_batch_size",
    "metrics",
)


@dataclass(frozen=True)
class Catalogue:
    """The known names of each section, with the type of their settings."""

    # From the names that a section accepts to the type of their settings.
    data: SettingsTypes
    partition: SettingsTypes
    model: SettingsTypes
    method: SettingsTypes
    personalization: SettingsTypes
    # From a method's name to the name of its default personalisation.
    personalization_of: Mapping[str, str]
    # Finds conflicts between the settings of an otherwise valid experiment.
    check: Callable[[Experiment], Sequence[Problem]]
    # Loads code of the user; raises `OwnCodeError` with the reason if it cannot.
    open_own: OpenOwn | None = None
    # Names that are chosen within the sections ``training`` and ``run``.
    optimizer: SettingsTypes = field(default_factory=lambda: {"SGD": SgdSettings})
    loss: SettingsTypes = field(default_factory=lambda: {"cross_entropy": Settings})
    compression: SettingsTypes = field(default_factory=dict)
    metric: SettingsTypes = field(default_factory=dict)


def require_kind(document: object, expected: str, source: str) -> None:
    """Reject the content of a file of another kind; name the command that takes it.

    ``expected``: ``experiment``, ``sweep`` or ``comparison``.
    """
    if not isinstance(document, Mapping):
        return
    kinds = (
        kind
        for kind, keys in _KIND_KEYS.items()
        if any(key in document for key in keys)
    )
    kind = next(kinds, expected)
    if kind == expected:
        return
    article = "an" if kind == "experiment" else "a"
    message = (
        f"found {article} {kind}, which is no {expected}; run it with knnper "
        f"{_COMMANDS[kind]}"
    )
    if kind == "experiment":
        message += f", or {_FROM_AN_EXPERIMENT[expected]}"
    raise ConfigError([Problem("document", message)], source)


def read_experiment(
    path: Path, catalogue: Catalogue, overrides: Sequence[str] = ()
) -> Experiment:
    """Read an experiment from a YAML file; see `load_experiment`."""
    source, document = str(path), read_yaml(path)
    if document is None:
        message = f"the file is empty; expected the keys {', '.join(SECTIONS)}"
        raise ConfigError([Problem(source, message)], source)
    source, folder = with_overrides(source, overrides), path.absolute().parent
    return load_experiment(document, catalogue, overrides, source, folder)


def load_experiment(
    document: Mapping[str, Any],
    catalogue: Catalogue,
    overrides: Sequence[str] = (),
    source: str = "experiment",
    folder: Path | None = None,
) -> Experiment:
    """Validate a document of plain values and return it as an experiment.

    A `ConfigError` lists *all* problems: unknown keys and names (with the nearest valid
    one), values of a wrong type or out of range, missing keys, and conflicts between
    settings.

    ``overrides``: ``KEY=VALUE`` with a dotted key and a YAML value, applied in order to
    a copy. ``source``: Name of the document in errors. ``folder``: Searched for the
    user's code, unless the document's key ``own_code`` names a folder, which may be
    relative to this one; with None and no such key only the Python path is searched.
    """
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected the keys {', '.join(SECTIONS)}"
        raise ConfigError([Problem("document", message)], source)
    require_kind(document, "experiment", source)
    problems: list[Problem] = []
    parsed = parse_overrides(overrides, problems)
    merged = apply_overrides(document, parsed, problems)
    # The overrides are in ``merged`` already; the reader's advice mentions them.
    reader = _ExperimentReader(merged, parsed, problems, catalogue.open_own, folder)
    experiment = reader.experiment(catalogue)
    if experiment is not None and not problems:
        problems.extend(catalogue.check(experiment))
    if experiment is None or problems:
        raise ConfigError(problems, source)
    return experiment


class _ExperimentReader(SectionReader):
    """Reads the sections of an experiment."""

    def experiment(self, catalogue: Catalogue) -> Experiment | None:
        """Return the experiment; None if any section has problems."""
        for key in self.document:
            if key not in SECTIONS:
                known = alternatives(str(key), SECTIONS)
                self.add_problem(str(key), f"unknown section; {known}")
        name = self._name()
        data = self.choice("data", catalogue.data)
        partition = self.choice("partition", catalogue.partition)
        model = self.choice("model", catalogue.model)
        training = self._training(catalogue)
        method = self.choice("method", catalogue.method)
        personalization = self._personalization(catalogue, method)
        run = self._run(catalogue)
        if run is not None:
            self.problems.extend(run_problems(run))
        privacy = None
        if self.document.get("privacy") is not None:
            privacy = self.parse("privacy", PrivacySettings)
        sections = (name, data, partition, model, training, method)
        if any(section is None for section in (*sections, personalization, run)):
            return None
        experiment = Experiment(*sections, personalization, run, privacy=privacy)  # type: ignore[arg-type]
        experiment = dataclasses.replace(
            experiment, policy=self._policy(experiment.personalization)
        )
        folder = next(iter(self.folders), None)
        return dataclasses.replace(
            experiment, own_code=None if folder is None else str(folder)
        )

    def _policy(self, personalization: Choice[Settings]) -> Choice[Settings] | None:
        """Load the eviction policy of the personalisation if it is the user's code."""
        for place, value in dotted(plain(personalization)):
            if place.endswith("store.policy") and is_reference(value):
                return self.own_choice("personalization.store.policy", str(value), {})
        return None

    def _training(self, catalogue: Catalogue) -> TrainingSettings | None:
        """Parse the section ``training``, which contains choices by name."""
        section = self.document.get("training", {})
        if not isinstance(section, Mapping):
            return self.parse("training", TrainingSettings)
        inner = {
            "optimizer": catalogue.optimizer,
            "loss": catalogue.loss,
            "compression": catalogue.compression,
        }
        plain_settings = {key: section[key] for key in section if key not in inner}
        training = self.parse("training", TrainingSettings, plain_settings)
        chosen = {
            name: self.choice(f"training.{name}", known, value=section[name])
            for name, known in inner.items()
            if section.get(name) is not None
        }
        if training is None or None in chosen.values():
            return None
        training = dataclasses.replace(training, **chosen)  # type: ignore[arg-type]
        self.problems.extend(training_problems(training))
        return training

    def _run(self, catalogue: Catalogue) -> RunSettings | None:
        """Parse the section ``run``, in which metrics are chosen by name."""
        section_values, section = self.document.get("run", {}), "run.metrics"
        if not isinstance(section_values, Mapping) or not isinstance(
            section_values.get("metrics"), list
        ):
            return self.parse("run", RunSettings)
        plain_settings = {
            key: value for key, value in section_values.items() if key != "metrics"
        }
        run = self.parse("run", RunSettings, plain_settings)
        choices = [
            self.choice(section, catalogue.metric, value=value)
            for value in section_values["metrics"]
        ]
        metrics = tuple(choice for choice in choices if choice is not None)
        names = [metric.metric_name for metric in metrics]
        for metric in metrics:
            is_ours = (
                metric.entry is not None and metric.metric_name in catalogue.metric
            )
            if is_ours or names.count(metric.metric_name) > 1:
                message = f"found {metric.metric_name} twice, expected distinct names"
                self.add_problem(section, message)
        if run is None or len(metrics) < len(choices):
            return None
        return dataclasses.replace(run, metrics=metrics)

    def _name(self) -> str | None:
        name = self.document.get("name")
        if isinstance(name, str) and is_name(name):
            return name
        shown_name = shown(name) if "name" in self.document else "nothing"
        message = (
            f"found {shown_name}, expected a name for the run's folder: letters, "
            "digits, '.', '_' and '-', with a letter or digit first"
        )
        self.add_problem("name", message)
        return None

    def _personalization(
        self, catalogue: Catalogue, method: Choice[Settings] | None
    ) -> Choice[Settings] | None:
        """Parse the personalisation, by default that of the method."""
        default = None
        if method is not None:
            default = getattr(method.entry, "personalization", None)
        chosen_method = self.document.get("method")
        name = (
            chosen_method.get("name")
            if isinstance(chosen_method, Mapping)
            else chosen_method
        )
        default = default or catalogue.personalization_of.get(str(name))
        if default is None:
            return None
        return self.choice("personalization", catalogue.personalization, default)


def run_problems(run: RunSettings) -> Iterable[Problem]:
    """Yield conflicts between settings of the section ``run``."""
    if run.ray_address is None:
        return
    if run.engine == "serial":
        message = (
            f"found {run.ray_address!r} with engine = serial, expected null: only the "
            "engine flower runs on Ray; set one of the two"
        )
        yield Problem("run.ray_address", message)
    if run.num_workers is not None:
        message = (
            f"found {run.num_workers} with a ray_address, expected null: a cluster has "
            "as many workers as it has room for; set run.cpus_per_client instead"
        )
        yield Problem("run.num_workers", message)


def training_problems(training: TrainingSettings) -> Iterable[Problem]:
    """Yield conflicts between settings of the section ``training``."""
    if training.local_epochs is not None and training.local_steps is not None:
        message = (
            f"found local_epochs = {training.local_epochs} and local_steps = "
            f"{training.local_steps}, expected one of the two; set the other to null"
        )
        yield Problem("training.local_steps", message)
    if isinstance(training.timing, BufferedTiming) and not isinstance(
        training.selection, UniformSelection
    ):
        message = (
            f"found {training.selection.name} with timing = buffered, which draws "
            "clients one by one, expected uniform; remove one of the two settings"
        )
        yield Problem("training.selection", message)
    if training.example_privacy is not None and training.class_weights == "balanced":
        yield Problem(
            "training.class_weights",
            "found balanced with example_privacy, expected fixed weights or null: a "
            "client's label counts are not private",
        )
    optimizer = training.optimizer.name
    for name in ("momentum", "weight_decay"):
        if optimizer != "SGD" and getattr(training, name):
            message = (
                f"found {getattr(training, name)}, a setting of SGD, with {optimizer}; "
                f"remove {name}, and set {optimizer}'s own in training.optimizer"
            )
            yield Problem(f"training.{name}", message)
    sgd = training.optimizer.settings
    if (
        isinstance(sgd, SgdSettings)
        and sgd.nesterov
        and (not training.momentum or sgd.dampening)
    ):
        message = "found true, expected training.momentum above 0 and no dampening"
        yield Problem("training.optimizer.nesterov", message)
    if isinstance(training.schedule, MultiStepSchedule):
        milestones = training.schedule.milestones
        if any(b <= a for a, b in itertools.pairwise(milestones)):
            message = f"found {shown(milestones)}, expected increasing rounds"
            yield Problem("training.schedule.milestones", message)


def to_document(experiment: Experiment) -> dict[str, Any]:
    """Return every setting of ``experiment``, defaults included, as plain values."""
    document = {name: plain(getattr(experiment, name)) for name in SECTIONS}
    for name in ("own_code", "privacy"):
        if document[name] is None:
            del document[name]
    # Absent, so that documents and identities of other experiments stay as they were.
    for name in ("example_privacy", "secure_aggregation"):
        if getattr(experiment.training, name) is None:
            del document["training"][name]
    return document


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
    """Read back an experiment that `to_json` wrote."""
    try:
        document = parse_json(text)
    except ValueError as error:
        raise ConfigError([Problem("document", f"no JSON: {error}")], source) from error
    return load_experiment(document, catalogue, overrides, source)


def results_identity(experiment: Experiment) -> str:
    """Return a SHA-256, in hexadecimal, of all settings that the results depend on.

    From the section ``run`` these are the seed, the criteria for failed updates and
    rounds, and the threads, batches and kind of device that fix the order of sums. Two
    experiments with the same identity end with the same numbers, whatever their names
    and machines.
    """
    relevant = relevant_settings(experiment)
    run = relevant.pop("run")
    text = json.dumps([run, relevant], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def relevant_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings behind `results_identity` as plain values by section."""
    document = to_document(experiment)
    run = {name: document["run"][name] for name in _RUN_SETTINGS_OF_RESULTS}
    run["gpu"] = experiment.run.gpus_per_client > 0
    left_out = ("name", "run", "own_code")
    relevant = {key: document[key] for key in document if key not in left_out}
    # Both are derived from other settings once the model is built.
    for name in ("frozen", "memory_format"):
        relevant["model"].pop(name, None)
    if own_code := experiment.own():
        relevant["own_code"] = {
            place: reference.fingerprint for place, reference in own_code.items()
        }
    return {**relevant, "run": run}
