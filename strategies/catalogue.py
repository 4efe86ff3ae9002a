"""The table of all methods, by the name that an experiment chooses them with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from knnper.data.examples import (
    Examples,
    InputSpec,
    augmentation_problems,
    normalizer,
    require_augmentable,
)
from knnper.data.site_data import SITES, SitesSettings
from knnper.errors import Problem
from knnper.experiment import (
    Catalogue,
    Choice,
    Experiment,
    Settings,
    SettingsTypes,
    TrainingSettings,
)
from knnper.models.catalogue import MODELS, build_model
from knnper.models.flat import ModelSettings
from knnper.process import prepare_process, require_precision
from knnper.seeding import RandomKey
from knnper.strategies import (
    agnostic,
    apfl,
    bulyan,
    clustered_fl,
    dapper,
    ditto,
    fed_mtl,
    fedadagrad,
    fedadam,
    fedattn,
    fedavg,
    fedavg_plus,
    fedavgm,
    fedbasis,
    fedbn,
    fedem,
    fedmedian,
    fedper,
    fedprox,
    fedrep,
    fedtrimmedavg,
    fedyogi,
    fine_tuning,
    hypcluster,
    knn_fine_tuned,
    knn_per,
    knn_per_protonn,
    krum,
    l2gd,
    lg_fedavg,
    linear_probe,
    local,
    mapper,
    mapper_two_stage,
    multikrum,
    per_fedavg,
    pfedgp,
    pfedhn,
    pfedme,
    qfedavg,
    scaffold,
)
from knnper.strategies.core.method import (
    AS_IT_IS,
    Method,
    MethodSpec,
    NoSettings,
    PersonalizerSpec,
)
from knnper.strategies.core.task import EmbeddingPool, Task

METHODS: Mapping[str, MethodSpec] = MappingProxyType(
    {
        "fedavg": fedavg.SPEC,
        "local": local.SPEC,
        "fedavg_plus": fedavg_plus.SPEC,
        "knn_per": knn_per.SPEC,
        "knn_per_protonn": knn_per_protonn.SPEC,
        "scaffold": scaffold.SPEC,
        "fedem": fedem.SPEC,
        "pfedhn": pfedhn.SPEC,
        "clustered_fl": clustered_fl.SPEC,
        "ditto": ditto.SPEC,
        "apfl": apfl.SPEC,
        "fedrep": fedrep.SPEC,
        "per_fedavg": per_fedavg.SPEC,
        "fedprox": fedprox.SPEC,
        "pfedme": pfedme.SPEC,
        "fedbn": fedbn.SPEC,
        "fedper": fedper.SPEC,
        "lg_fedavg": lg_fedavg.SPEC,
        "fed_mtl": fed_mtl.SPEC,
        "l2gd": l2gd.SPEC,
        "agnostic": agnostic.SPEC,
        "hypcluster": hypcluster.SPEC,
        "mapper": mapper.SPEC,
        "fedattn": fedattn.SPEC,
        "fedbasis": fedbasis.SPEC,
        "pfedgp": pfedgp.SPEC,
        "fedavgm": fedavgm.SPEC,
        "fedadam": fedadam.SPEC,
        "fedadagrad": fedadagrad.SPEC,
        "fedyogi": fedyogi.SPEC,
        "qfedavg": qfedavg.SPEC,
        "fedmedian": fedmedian.SPEC,
        "fedtrimmedavg": fedtrimmedavg.SPEC,
        "krum": krum.SPEC,
        "multikrum": multikrum.SPEC,
        "bulyan": bulyan.SPEC,
    }
)
"""Read-only: a new method is a new file and a new line here."""


PERSONALIZERS: Mapping[str, PersonalizerSpec] = MappingProxyType(
    {
        AS_IT_IS: PersonalizerSpec(
            title="",
            summary="Clients are served what the method itself gives them.",
            source="the method's own",
            settings_type=NoSettings,
            apply=lambda task, method, settings: method,
            unseen="what the method gives them",
        ),
        "fine_tuning": fine_tuning.ON_TOP,
        "linear_probe": linear_probe.ON_TOP,
        "knn": knn_per.ON_TOP,
        "protonn": knn_per_protonn.ON_TOP,
        "knn_fine_tuned": knn_fine_tuned.ON_TOP,
        "dapper": dapper.ON_TOP,
        "mapper_two_stage": mapper_two_stage.ON_TOP,
    }
)
"""Read-only: a new one is a new file and a new line here."""


@dataclass(frozen=True)
class Assembly:
    """What an experiment stands for, but for its clients.

    Attributes
    ----------
    experiment
        Its settings.
    key
        The root of all its random choices.
    task
        What is learned.
    method
        How.
    """

    experiment: Experiment
    key: RandomKey
    task: Task
    method: Method


def assemble(
    experiment: Experiment,
    spec: InputSpec,
    device: torch.device = torch.device("cpu"),
    proxy: Callable[[], Examples] | None = None,
    pool: EmbeddingPool | None = None,
    on_trained: Callable[[int, float], None] | None = None,
) -> Assembly:
    """Build model and method; set what torch takes from the whole process.

    Parameters
    ----------
    experiment
        Its settings.
    spec
        What a model must know about the data.
    device
        Where the model computes; `compute_device` says it of a process that plays
        clients. Data, records and whatever the method returns stay on the CPU.
    proxy
        Returns the examples that the server has of its own, if it has any.
    pool
        Where embeddings are looked for first; one of its own by default.
    on_trained
        See `Task`.
    """
    require_precision(experiment.training.precision, device)
    prepare_process(experiment.run, device)
    task = build_task(
        experiment.model,
        experiment.training,
        spec,
        RandomKey(experiment.run.seed),
        evaluation_batch_size=experiment.run.evaluation_batch_size,
        device=device,
    )
    task = replace(task, proxy=proxy, pool=pool or EmbeddingPool())
    if on_trained is not None:
        task = replace(task, on_trained=on_trained)
    return Assembly(
        experiment, RandomKey(experiment.run.seed), task, build_method(experiment, task)
    )


def build_method(experiment: Experiment, task: Task) -> Method:
    """Return the experiment's method on ``task``, with what it puts on top."""
    chosen, on_top = experiment.method, experiment.personalization
    method = METHODS[chosen.name].build(task, chosen.settings)
    return PERSONALIZERS[on_top.name].apply(task, method, on_top.settings)


def build_task(
    model: Choice[Settings],
    training: TrainingSettings,
    spec: InputSpec,
    key: RandomKey,
    *,
    evaluation_batch_size: int,
    device: torch.device = torch.device("cpu"),
) -> Task:
    """Return the task of training ``model`` on inputs as ``spec`` says.

    Parameters
    ----------
    model, training
        The experiment's sections.
    spec
        What a model must know about the data.
    key
        The experiment's root key: initial weights depend on it.
    evaluation_batch_size
        Images in one forward pass where nothing is trained.
    device
        Where the model computes.

    Raises
    ------
    ConfigError
        If the model does not take such inputs, or these cannot be augmented so.
    """
    require_augmentable(training.augmentation, spec)

    def fresh_weights(rng: RandomKey) -> Tensor:
        return build_model(model, spec, rng).read()

    built = build_model(model, spec, key.child("model"), device)
    return Task(
        model=built,
        initial_weights=built.read(),
        fresh_weights=fresh_weights,
        normalize=normalizer(spec, device),
        spec=spec,
        training=training,
        evaluation_batch_size=evaluation_batch_size,
    )


SITE_DATA_SETS: SettingsTypes = MappingProxyType({SITES: SitesSettings})

SITE_PARTITIONS: SettingsTypes = MappingProxyType({SITES: NoSettings})


class Entry(Protocol):
    """What the tables of data sets, partitions, models and methods have in common."""

    @property
    def settings_type(self) -> type[Settings]:
        """Return what the section takes beside the name."""


def settings_types(entries: Mapping[str, Entry]) -> SettingsTypes:
    """Return the type of each entry's settings by its name."""
    return {name: entry.settings_type for name, entry in entries.items()}


def catalogue_of(
    data: SettingsTypes,
    partition: SettingsTypes,
    check: Callable[[Experiment], Sequence[Problem]],
) -> Catalogue:
    """Return the catalogue of all models and methods, over the given data.

    Parameters
    ----------
    data, partition
        What these sections choose from.
    check
        Finds what does not go together, beside what a method's own check finds.
    """

    def check_all(experiment: Experiment) -> Sequence[Problem]:
        return (
            *check(experiment),
            *_input_problems(experiment),
            *METHODS[experiment.method.name].check(experiment),
            *_personalization_problems(experiment),
            *PERSONALIZERS[experiment.personalization.name].check(experiment),
        )

    return Catalogue(
        data=data,
        partition=partition,
        model=settings_types(MODELS),
        method=settings_types(METHODS),
        personalization=settings_types(PERSONALIZERS),
        personalization_of={
            name: spec.personalization for name, spec in METHODS.items()
        },
        check=check_all,
    )


def title_of(method: str, personalization: str) -> str:
    """Return what tables call a method with what is put on top of it.

    Parameters
    ----------
    method, personalization
        Names; of another version, perhaps, and then given as they are.
    """
    known = METHODS.get(method)
    title = known.title if known else method
    if personalization == (known.personalization if known else AS_IT_IS):
        return title
    on_top = PERSONALIZERS.get(personalization)
    return f"{title} + {on_top.title if on_top else personalization}"


def _personalization_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield why a personalisation cannot be put on top of the method."""
    method, name = experiment.method.name, experiment.personalization.name
    spec, on_top = METHODS[method], PERSONALIZERS[name]
    if spec.personalization not in (AS_IT_IS, name):
        message = (
            f"found {name} with {method}, which always has {spec.personalization}; "
            "choose the method without it, such as fedavg"
        )
        yield Problem("personalization.name", message)
    elif on_top.needs_one_model and not spec.serves_one_model:
        others = [key for key, one in PERSONALIZERS.items() if not one.needs_one_model]
        message = (
            f"found {name} with {method}, whose clients are not served one set of "
            f"weights; expected one of {', '.join(others)}"
        )
        yield Problem("personalization.name", message)


def _input_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield what cannot be done with the data's kind of input, where it is known."""
    data = experiment.data.settings
    if isinstance(data, SitesSettings):
        yield from augmentation_problems(experiment.training.augmentation, data.dtype)


def without_start(experiment: Experiment) -> Experiment:
    """Return the experiment less the file of initial weights.

    Only the server, and only when training begins, needs that file.
    """
    settings = experiment.model.settings
    if not isinstance(settings, ModelSettings):
        raise TypeError(f"expected ModelSettings, found {type(settings).__name__}")
    choice = replace(experiment.model, settings=replace(settings, weights=None))
    return replace(experiment, model=choice)


def site_catalogue() -> Catalogue:
    """Return the catalogue of experiments over data that stays with the sites."""
    return catalogue_of(SITE_DATA_SETS, SITE_PARTITIONS, lambda _: ())
