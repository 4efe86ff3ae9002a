"""An experiment from a file: validated once, all that is wrong reported together."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from knnper.config.catalogue import Catalogue, SettingsTypes
from knnper.config.errors import ConfigError, Problem
from knnper.config.names import is_name
from knnper.config.overrides import (
    Override,
    apply_overrides,
    parse_overrides,
    with_overrides,
)
from knnper.config.parsing import parse_settings
from knnper.config.sections import (
    Choice,
    Experiment,
    MultiStepSchedule,
    RunSettings,
    Settings,
    TrainingSettings,
)
from knnper.config.suggestions import alternatives, shown
from knnper.config.yaml_text import parse_yaml

SECTIONS = (
    "name",
    "data",
    "partition",
    "model",
    "training",
    "method",
    "personalization",
    "run",
)

S = TypeVar("S", bound=Settings)


def read_experiment(
    path: Path, catalogue: Catalogue, overrides: Sequence[str] = ()
) -> Experiment:
    """Return the experiment that the YAML file at ``path`` describes.

    Raises
    ------
    ConfigError
        If the file cannot be read or is no YAML, and as `load_experiment`.
    """
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        message = "there is no such file; give the path of an experiment's YAML file"
        raise ConfigError([Problem(source, message)], source) from error
    except (OSError, UnicodeDecodeError) as error:
        message = f"expected a readable text file in UTF-8: {error}"
        raise ConfigError([Problem(source, message)], source) from error
    document = parse_yaml(text, source)
    if document is None:
        message = f"the file is empty; expected the keys {', '.join(SECTIONS)}"
        raise ConfigError([Problem(source, message)], source)
    return load_experiment(
        document, catalogue, overrides, with_overrides(source, overrides)
    )


def load_experiment(
    document: Mapping[str, Any],
    catalogue: Catalogue,
    overrides: Sequence[str] = (),
    source: str = "experiment",
) -> Experiment:
    """Return the experiment that ``document`` describes.

    Parameters
    ----------
    document
        Plain values: mappings, lists, text, numbers, booleans, None.
    catalogue
        What can be chosen by name.
    overrides
        ``KEY=VALUE`` with a dotted key and a YAML value; made in order on a copy.
    source
        Where the document is from; named in errors.

    Raises
    ------
    ConfigError
        With *all* problems: unknown keys and names (with the nearest valid one),
        values of a wrong type or out of range, missing keys, and settings that do not
        go together.
    """
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected the keys {', '.join(SECTIONS)}"
        raise ConfigError([Problem("document", message)], source)
    problems: list[Problem] = []
    parsed = parse_overrides(overrides, problems)
    merged = apply_overrides(document, parsed, problems)
    experiment = _Sections(merged, parsed, problems).experiment(catalogue)
    if experiment is not None and not problems:
        problems.extend(catalogue.check(experiment))
    if experiment is None or problems:
        raise ConfigError(problems, source)
    return experiment


class _Sections:
    """Reads the sections of one document and collects what is wrong with them."""

    def __init__(
        self,
        document: Mapping[str, Any],
        overrides: Sequence[Override],
        problems: list[Problem],
    ) -> None:
        self._document = document
        self._overrides = overrides
        self._problems = problems

    def experiment(self, catalogue: Catalogue) -> Experiment | None:
        """Return the experiment; None when a section of it is wrong."""
        self._refuse_unknown_sections()
        name = self._name()
        data = self._section("data", catalogue.data)
        partition = self._section("partition", catalogue.partition)
        model = self._section("model", catalogue.model)
        training = self._settings("training", TrainingSettings)
        if training is not None:
            self._problems.extend(training_problems(training))
        method = self._section("method", catalogue.method)
        personalization = self._personalization(catalogue)
        run = self._settings("run", RunSettings)
        if run is not None:
            self._problems.extend(run_problems(run))
        sections = (name, data, partition, model, training, method)
        if any(section is None for section in (*sections, personalization, run)):
            return None
        return Experiment(*sections, personalization, run)  # type: ignore[arg-type]

    def _refuse_unknown_sections(self) -> None:
        for key in self._document:
            if key not in SECTIONS:
                known = alternatives(str(key), SECTIONS)
                self._add(str(key), f"unknown section; {known}")

    def _name(self) -> str | None:
        name = self._document.get("name")
        if isinstance(name, str) and is_name(name):
            return name
        found = shown(name) if "name" in self._document else "nothing"
        message = (
            "expected a name for the run's folder: letters, digits, '.', '_' and '-', "
            f"a letter or digit first; found {found}"
        )
        self._add("name", message)
        return None

    def _section(self, section: str, known: SettingsTypes) -> Choice[Settings] | None:
        return self._choice(section, known, self._document.get(section))

    def _choice(
        self, section: str, known: SettingsTypes, value: object
    ) -> Choice[Settings] | None:
        if not isinstance(value, Mapping):
            found = shown(value) if section in self._document else "nothing"
            example = f"{{name: {sorted(known)[0]}}}" if known else "{name: ...}"
            self._add(section, f"found {found}, expected a mapping such as {example}")
            return None
        name = value.get("name")
        if not isinstance(name, str) or name not in known:
            found = "found no name" if name is None else f"unknown name {shown(name)}"
            nearest = alternatives(str(name), known)
            self._add(f"{section}.name", f"{found}; {nearest}")
            return None
        settings = {key: item for key, item in value.items() if key != "name"}
        parsed = self._parsed(section, known[name], settings)
        return None if parsed is None else Choice(name, parsed)

    def _personalization(self, catalogue: Catalogue) -> Choice[Settings] | None:
        """Return what is put on top of the method; None without a method.

        A section without a name is of the kind that the method has by default; a name
        alone may stand for the section.
        """
        method = self._document.get("method")
        of_what = method.get("name") if isinstance(method, Mapping) else None
        if not isinstance(of_what, str) or of_what not in catalogue.personalization_of:
            return None
        value = self._document.get("personalization", {})
        if isinstance(value, str):
            value = {"name": value}
        default = {"name": catalogue.personalization_of[of_what]}
        if isinstance(value, Mapping):
            value = default | dict(value)
        return self._choice("personalization", catalogue.personalization, value)

    def _settings(self, section: str, settings_type: type[S]) -> S | None:
        return self._parsed(section, settings_type, self._document.get(section, {}))

    def _parsed(self, section: str, settings_type: type[S], value: object) -> S | None:
        hint = self._hint(section)
        return parse_settings(settings_type, value, section, self._problems, hint)

    def _hint(self, section: str) -> str:
        """Return how to get rid of keys that belong to what an override replaced."""
        chooser, names = section, self._names_chosen(section)
        if section == "personalization" and not names:
            chooser, names = "method", self._names_chosen("method")
        if not names:
            return ""
        whole = "{}" if chooser != section else f"{{name: {names[-1]}}}"
        return (
            f"; an override changed {chooser}: if this key belongs to the former one, "
            f"replace the section, --set '{section}={whole}'"
        )

    def _names_chosen(self, section: str) -> list[object]:
        """Return the names that overrides gave to a section."""
        changes = {(section,), (section, "name")}
        return [one.value for one in self._overrides if one.path in changes]

    def _add(self, place: str, message: str) -> None:
        self._problems.append(Problem(place, message))


def run_problems(run: RunSettings) -> Iterable[Problem]:
    """Yield what does not go together in the section ``run``."""
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
    """Yield what does not go together in the section ``training``."""
    if training.local_epochs is not None and training.local_steps is not None:
        message = (
            f"found local_epochs = {training.local_epochs} and local_steps = "
            f"{training.local_steps}, expected one of the two; set the other to null"
        )
        yield Problem("training.local_steps", message)
    if isinstance(training.schedule, MultiStepSchedule):
        milestones = training.schedule.milestones
        if any(b <= a for a, b in itertools.pairwise(milestones)):
            message = f"found {shown(milestones)}, expected increasing rounds"
            yield Problem("training.schedule.milestones", message)
