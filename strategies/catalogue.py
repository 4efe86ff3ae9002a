"""The catalogue of methods and personalisations, and checks of their settings."""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from knnper.data.augmentation import augmentation_problems
from knnper.data.site_task import SITES, SitesSettings
from knnper.datastore.policy import OWN_POLICY, bring_policy
from knnper.embedding_model import ModelSettings
from knnper.errors import OwnCodeError, Problem
from knnper.experiment import Experiment, SynchronousTiming, TrainingSettings
from knnper.experiment_file import Catalogue, results_identity, to_document
from knnper.metrics import METRICS, OWN_METRIC
from knnper.models import MODELS, OWN_MODEL
from knnper.own import Door, Kind
from knnper.reasons import Code, SafeReason
from knnper.settings import Choice, Own, Settings, SettingsTypes
from knnper.strategies.core.compression import COMPRESSION, OWN_COMPRESSOR
from knnper.strategies.core.method import (
    AS_IT_IS,
    AsItIs,
    Method,
    NoSettings,
    Personalizer,
)
from knnper.strategies.core.optimizers import (
    LOSSES,
    OPTIMIZERS,
    OWN_LOSS,
    OWN_OPTIMIZER,
    optimizer_problem,
)
from knnper.strategies.core.private_updates import privacy_problems


def _methods_and_personalizers() -> Iterator[type[Method]]:
    """Yield the methods and personalisations that the package's modules define.

    Base classes have no title of their own and are left out.
    """
    package = importlib.import_module("knnper.strategies")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.ispkg or module.name == __name__:
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if _is_titled(kind, Method) and kind.__module__ == module.name:
                yield kind


def _is_titled(entry: object, base: type[Method]) -> bool:
    is_subclass = isinstance(entry, type) and issubclass(entry, base)
    return is_subclass and "title" in vars(entry)


_TITLED = tuple(_methods_and_personalizers())

METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {kind.name: kind for kind in _TITLED if not issubclass(kind, Personalizer)}
)
"""All methods by their names in experiments. A new file in the folder is found."""


PERSONALIZERS: Mapping[str, type[Personalizer]] = MappingProxyType(
    {AS_IT_IS: AsItIs}
    | {kind.name: kind for kind in _TITLED if issubclass(kind, Personalizer)}
)
"""All personalisations by name."""


def trained_as(name: str) -> str:
    """Return the method without a personalisation that makes the same rounds."""
    kind = METHODS.get(name, Method)
    # Such as kNN-Per, which is FedAvg with its memory on top.
    if kind.personalization == AS_IT_IS:
        return name
    return next(base.name for base in kind.__mro__[1:] if issubclass(base, Method))


SITE_DATA_SETS: SettingsTypes = {SITES: SitesSettings}
SITE_PARTITIONS: SettingsTypes = {SITES: NoSettings}


def is_method(entry: object) -> bool:
    """Return whether a user's ``entry`` is a method."""
    return _is_titled(entry, Method) and not is_personalizer(entry)


def is_personalizer(entry: object) -> bool:
    """Return whether a user's ``entry`` is a personalisation."""
    return _is_titled(entry, Personalizer)


KINDS: Mapping[str, Kind] = {
    "model": OWN_MODEL,
    "method": Kind("a subclass of knnper.Method with a title", is_right=is_method),
    "personalization": Kind(
        "a subclass of knnper.Personalizer with a title", is_right=is_personalizer
    ),
    "personalization.store.policy": OWN_POLICY,
    "training.optimizer": OWN_OPTIMIZER,
    "training.loss": OWN_LOSS,
    "training.compression": OWN_COMPRESSOR,
    "run.metrics": OWN_METRIC,
}
"""The kinds of users' own code, by section."""


def method_of(choice: Choice[Settings]) -> type[Method]:
    """Return the class of the chosen method."""
    return METHODS[choice.name] if choice.entry is None else choice.entry


def personalizer_of(choice: Choice[Settings]) -> type[Personalizer]:
    """Return the class of the chosen personalisation."""
    return PERSONALIZERS[choice.name] if choice.entry is None else choice.entry


def settings_types(entries: Mapping[str, Any]) -> SettingsTypes:
    """Return the ``settings_type`` of each entry of a table by its name."""
    return {name: entry.settings_type for name, entry in entries.items()}


OpenDoor = Callable[[Path | None], Door]


def catalogue_of(
    data: SettingsTypes,
    partition: SettingsTypes,
    check: Callable[[Experiment], Sequence[Problem]],
    kinds: Mapping[str, Kind] = KINDS,
    door: OpenDoor = Door,
) -> Catalogue:
    """Return the catalogue of all models and methods, over the given data.

    ``kinds``: the kinds of users' own code, by section. ``door``: opens that code, from
    the folder that the experiment names.
    """

    def open_own(section: str, reference: str, folder: Path | None) -> Own:
        if section not in kinds:
            known = f"a name, or a reference in {', '.join(sorted(kinds))}"
            raise OwnCodeError(
                f"found {reference!r}, expected {known}",
                reason=SafeReason(Code.WRONG_NAME),
            )
        opened = door(folder)
        if kinds[section] is OWN_POLICY:
            return bring_policy(reference, opened)
        return opened.open(reference, kinds[section])

    def check_all(experiment: Experiment) -> Sequence[Problem]:
        chosen, on_top = experiment.method, experiment.personalization
        of_input: Iterable[Problem] = ()
        data = experiment.data.settings
        if isinstance(data, SitesSettings):  # the kind of input is known
            augmentation = experiment.training.augmentation
            of_input = augmentation_problems(augmentation, data.dtype)
        return (
            *check(experiment),
            *of_input,
            *method_of(chosen).check(chosen.settings, experiment),
            *_training_problems(experiment),
            *privacy_problems(experiment),
            *_sum_problems(experiment),
            *_personalization_problems(experiment),
            *personalizer_of(on_top).check(on_top.settings, experiment),
        )

    return Catalogue(
        data=data,
        partition=partition,
        model=settings_types(MODELS),
        method=settings_types(METHODS),
        personalization=settings_types(PERSONALIZERS),
        personalization_of={
            name: kind.personalization for name, kind in METHODS.items()
        },
        check=check_all,
        open_own=open_own,
        optimizer=OPTIMIZERS,
        loss=LOSSES,
        compression=COMPRESSION,
        metric=dict.fromkeys(METRICS, Settings),
    )


def title_of(method: str, personalization: str) -> str:
    """Return the title in tables of a method with a personalisation."""
    known = METHODS.get(method)
    title = known.title if known else method
    if personalization == (known.personalization if known else AS_IT_IS):
        return title
    on_top = PERSONALIZERS.get(personalization)
    return f"{title} + {on_top.title if on_top else personalization}"


def own_title(experiment: Experiment) -> Mapping[str, str]:
    """Return the title for the results if method or personalisation are user code."""
    method, on_top = experiment.method, experiment.personalization
    if method.entry is None and on_top.entry is None:
        return {}
    kind, top = method_of(method), personalizer_of(on_top)
    has_more = on_top.name != kind.personalization and top.title
    return {"title": kind.title + (f" + {top.title}" if has_more else "")}


def _training_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield conflicts of method and personalisation with the section ``training``."""
    training = experiment.training
    if problem := optimizer_problem(training.optimizer):
        yield Problem("training.optimizer.name", problem)
    kinds = method_of(experiment.method), personalizer_of(experiment.personalization)
    for kind in kinds:
        needs = {"optimizer": kind.needs_sgd, "loss": kind.needs_cross_entropy}
        for name, reason in needs.items():
            chosen = getattr(training, name).name
            expected = getattr(TrainingSettings, name).name
            if reason and chosen != expected:
                message = f"found {chosen} with {kind.title}, expected {expected}: "
                yield Problem(f"training.{name}.name", message + reason)
        if training.example_privacy is not None and not kind.sends_gradients_only:
            yield Problem(
                "training.example_privacy",
                f"found it with {kind.title}, expected a method with updates from "
                "one training by gradients, such as fedavg, fedprox or fedper: "
                "everything else that its clients send is not private",
            )
    if training.example_privacy is not None and experiment.privacy is not None:
        yield Problem(
            "training.example_privacy",
            "found it with the section privacy, which protects each example of a "
            "client too; expected one of the two",
        )


def _sum_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield conflicts of a run in which only sums of updates matter."""
    training, method = experiment.training, method_of(experiment.method)
    if experiment.privacy is None and training.secure_aggregation is None:
        return
    if not method.takes_mean:
        yield Problem(
            "method.name",
            f"found {method.title} with privacy or secure aggregation, expected a "
            "method with a server that needs only the mean of all updates, such as "
            "fedavg or knn_per",
        )
    if training.timing != SynchronousTiming():
        yield Problem(
            "training.timing",
            "found buffered steps, over-selection or a deadline with privacy or secure "
            "aggregation, expected none of them: the clients of a sum must be fixed "
            "before they train; leave out training.timing",
        )
    if training.secure_aggregation is not None and training.compression is not None:
        yield Problem(
            "training.compression",
            f"found {training.compression.name} with secure aggregation, which adds up "
            "encoded numbers of one fixed size; set it to null, or lower "
            "training.secure_aggregation.bits",
        )


def _personalization_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield the reasons why a personalisation cannot be put on top of the method."""
    method, name = experiment.method.name, experiment.personalization.name
    spec = method_of(experiment.method)
    on_top = personalizer_of(experiment.personalization)
    if spec.personalization not in (AS_IT_IS, name):
        message = (
            f"found {name} with {method}, which always has {spec.personalization}; "
            "choose the method without it, such as fedavg"
        )
        yield Problem("personalization.name", message)
    elif on_top.needs_one_model and not spec.serves_one_model:
        others = [
            key
            for key, personalizer in PERSONALIZERS.items()
            if not personalizer.needs_one_model
        ]
        message = (
            f"found {name} with {method}, which does not serve one set of weights to "
            f"each client; expected one of {', '.join(others)}"
        )
        yield Problem("personalization.name", message)


def without_start(experiment: Experiment) -> Experiment:
    """Return the experiment without its file of initial weights.

    A model that is not trained as a whole keeps the file, since it contains the frozen
    weights.
    """
    settings = experiment.model.settings
    if not isinstance(settings, ModelSettings):
        raise TypeError(f"expected ModelSettings, found {type(settings).__name__}")
    if settings.trained != "all" or settings.frozen is not None:
        return experiment
    return _elsewhere(experiment)


def for_sites(experiment: Experiment) -> str:
    """Return the experiment for sites as JSON, without paths of this machine.

    Users' own code is listed by fingerprint; the site's copy must have the same.
    """
    document = to_document(_elsewhere(experiment))
    if own_code := experiment.own():
        document["own_code"] = {
            entry.name: entry.fingerprint for entry in own_code.values()
        }
    return json.dumps(document)


def identity_at_sites(experiment: Experiment) -> str:
    """Return the `results_identity` of an experiment as a site computes it."""
    return results_identity(_elsewhere(experiment))


def _elsewhere(experiment: Experiment) -> Experiment:
    nothing: dict[str, Any] = {"weights": None}
    settings = replace(experiment.model.settings, **nothing)
    return replace(experiment, model=replace(experiment.model, settings=settings))


def site_catalogue(door: Door) -> Catalogue:
    """Return the catalogue of experiments over data that stays with the sites.

    Users' own code comes through the site's own ``door``.
    """
    return catalogue_of(
        SITE_DATA_SETS, SITE_PARTITIONS, lambda _: (), door=lambda _: door
    )
