"""An experiment: the fields of its file, and how it is read, checked and written."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from knnper.errors import ConfigError, Problem
from knnper.files import parse_json
from knnper.settings import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    OpenOwn,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    SectionReader,
    Settings,
    SettingsTypes,
    UnitInterval,
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
class ConstantSchedule(Settings):
    """A constant learning rate."""

    name: Literal["constant"] = "constant"

    def factor_at(self, server_round: int) -> float:  # noqa: ARG002
        """Return 1.0, the factor on the learning rate in every round."""
        return 1.0


@dataclass(frozen=True)
class MultiStepSchedule(Settings):
    """The learning rate is multiplied by ``factor`` at each milestone.

    Attributes
    ----------
    milestones
        Rounds (from 1) from which on the factor applies once more. The paper's
        CIFAR-10 runs use (100, 150) of 200 rounds (Marfoq et al. 2022, section 5).
    factor
        Multiplier of the rate at each milestone; 0.1 in the paper.
    """

    milestones: tuple[PositiveInt, ...]
    name: Literal["multi_step"] = "multi_step"
    factor: PositiveFraction = 0.1

    def factor_at(self, server_round: int) -> float:
        """Return the factor on the learning rate in ``server_round`` (from 1)."""
        passed = sum(server_round >= milestone for milestone in self.milestones)
        return float(self.factor**passed)


@dataclass(frozen=True)
class DeviceSettings(Settings):
    """Speed and availability of the clients' devices in virtual time.

    Speeds and links are log-normal over the clients. Each client keeps its own in all
    rounds.

    Attributes
    ----------
    examples_per_s
        Examples per second on which the median client trains the whole model.
    speed_spread
        Ratio of the fastest to the slowest of the middle 95 % of clients; 1 makes all
        alike.
    bytes_down_per_s, bytes_up_per_s
        Speed of the median client's link. Each way carries a model; the way up is
        shortened by what ``training.compression`` saves. Null: transfers take no time.
    link_spread
        As ``speed_spread``, for the links.
    available
        Fraction of the time that a client is available, (0, 1].
    period_s
        Mean time from the start of one absence to the next. Lengths of presence and
        absence are exponential.
    trace
        CSV or JSON file of measured devices. Each client gets one of them, drawn at
        random, with the speed, link and availability that the file gives for it.
    availability_trace
        File with the availability of devices, if it is separate from ``trace``.
    """

    examples_per_s: PositiveFloat = 100.0
    speed_spread: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    bytes_down_per_s: PositiveFloat | None = None
    bytes_up_per_s: PositiveFloat | None = None
    link_spread: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    available: PositiveFraction = 1.0
    period_s: PositiveFloat = 3600.0
    trace: str | None = None
    availability_trace: str | None = None


@dataclass(frozen=True)
class SynchronousTiming(Settings):
    """The server waits for the clients of a round (Bonawitz et al. 2019).

    Attributes
    ----------
    over_selection
        Number of clients selected, as a multiple of the number needed: a round ends
        once ``participation`` of all clients have replied.
    deadline_s
        Longest duration of a round. It then ends with the replies received, or with
        the first one if there is none yet. Null: no limit.
    """

    name: Literal["synchronous"] = "synchronous"
    over_selection: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    deadline_s: PositiveFloat | None = None


@dataclass(frozen=True)
class BufferedTiming(Settings):
    """The server steps after every few replies (FedBuff, Nguyen et al. 2022).

    ``participation`` of the clients train at any time. When a client replies, another
    one starts from the model of that moment. ``num_rounds`` counts the server's steps.

    Attributes
    ----------
    buffer_size
        K, the number of replies in one step.
    staleness_exponent
        a of the factor (1 + τ)^-a on a client's update, where τ is the number of steps
        made while the client trained.
    server_rate
        η of the server, a factor on all updates.
    """

    name: Literal["buffered"] = "buffered"
    buffer_size: PositiveInt = 10
    staleness_exponent: NonNegativeFloat = 0.5
    server_rate: PositiveFloat = 1.0


@dataclass(frozen=True)
class UniformSelection(Settings):
    """All available clients are equally likely."""

    name: Literal["uniform"] = "uniform"


@dataclass(frozen=True)
class UtilitySelection(Settings):
    """Sample clients by utility per second (Oort; Lai et al. 2021).

    Attributes
    ----------
    exploration, exploration_decay, min_exploration
        ε, the fraction of the first round's clients that are drawn uniformly, the
        factor on it in each further round, and its smallest value. 1, 1 is ``uniform``.
    staleness_weight
        b of the bonus sqrt(b ln R / L) in round R of a client that took part last in
        round L.
    preferred_quantile, straggler_exponent
        Used with ``devices``. T is the round time that this fraction of the clients
        does not exceed; α gives the factor (T / t)^α on the utility of a client that
        needs t > T.
    """

    name: Literal["utility"] = "utility"
    exploration: UnitInterval = 0.9
    exploration_decay: PositiveFraction = 0.98
    min_exploration: UnitInterval = 0.2
    staleness_weight: NonNegativeFloat = 0.1
    preferred_quantile: UnitInterval = 0.3
    straggler_exponent: NonNegativeFloat = 2.0


Selection = Annotated[UniformSelection | UtilitySelection, Field(discriminator="name")]
Timing = Annotated[SynchronousTiming | BufferedTiming, Field(discriminator="name")]
Augmentation = Literal["none", "flip", "crop_flip"]
Precision = Literal["float32", "bfloat16"]
Schedule = Annotated[ConstantSchedule | MultiStepSchedule, Field(discriminator="name")]


@dataclass(frozen=True)
class SgdSettings(Settings):
    """Settings of SGD beside momentum and weight decay.

    Attributes
    ----------
    dampening, nesterov
        As in ``torch.optim.SGD``.
    """

    dampening: NonNegativeFloat = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Federated training: rounds, participation, local optimisation.

    Attributes
    ----------
    num_rounds
        Communication rounds, T.
    participation
        Fraction of the seen clients with data that take part in a round, (0, 1].
    local_epochs, local_steps
        Length of a client's training in one round; set one of the two. With neither,
        one epoch.
    batch_size
        Examples in a mini-batch. The incomplete last batch is dropped if there is a
        full one before it.
    learning_rate
        Local SGD's rate, η; the paper's grid is 10^-0.5 ... 10^-2.5.
    momentum, weight_decay
        Of local SGD; the momentum buffer starts from zero in every round.
    augmentation
        Random change of the images of a mini-batch: ``none``, a horizontal ``flip``, or
        ``crop_flip``, a crop of the image in a black frame of 4 pixels and a flip.
    precision
        Of forward and backward passes, in training and in evaluation. With
        ``bfloat16`` weights and sums stay float32. ``auto`` is for simulations: it
        times steps in both on this machine at the start and takes the faster.
    schedule
        Factor on the learning rate as a function of the round.
    optimizer
        An optimiser of torch by its name with its settings, such as ``{name: AdamW,
        eps: 1e-6}``, or your own. Its state starts empty in every round. SGD takes
        ``momentum`` and ``weight_decay`` of this section, any other its own.
    loss
        ``cross_entropy``, or your own function ``(logits (n, c), labels (n,)) ->``
        the loss of each example (n,), or their mean. A class, such as
        ``torch.nn:MultiMarginLoss``, is first instantiated with its settings.
    class_weights
        Factor on the loss of an example by its label: one for each label, or
        ``balanced``, inverse to the frequency of the label at a client; null is 1.
    clip_norm
        Largest Euclidean norm of the loss's gradient; longer gradients are scaled to
        it. Null: no limit.
    compression
        Compression of the clients' updates: ``top_k``, ``quantize`` or ``sign`` with
        its settings, such as ``{name: top_k, fraction: 0.01}``, or your own; null
        sends every number in four bytes.
    devices
        Speed and availability of clients in virtual time; null: no virtual time.
    timing
        ``synchronous``: the server waits for the clients of a round. ``buffered``: it
        updates the model after every few replies.
    selection
        Sampling of a round's clients: ``uniform``, or by ``utility`` per second.
    """

    num_rounds: PositiveInt = 50
    participation: PositiveFraction = 1.0
    local_epochs: PositiveInt | None = None
    local_steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 0.03
    momentum: ProperFraction = 0.0
    weight_decay: NonNegativeFloat = 0.0
    augmentation: Augmentation = "none"
    precision: Precision | Literal["auto"] = "float32"
    schedule: Schedule = field(default_factory=ConstantSchedule)
    optimizer: Choice[Settings] = field(default=Choice("SGD", SgdSettings()))
    loss: Choice[Settings] = field(default=Choice("cross_entropy", Settings()))
    class_weights: Literal["balanced"] | tuple[NonNegativeFloat, ...] | None = None
    clip_norm: PositiveFloat | None = None
    compression: Choice[Settings] | None = None
    devices: DeviceSettings | None = None
    timing: Timing = SynchronousTiming()
    selection: Selection = UniformSelection()

    def learning_rate_at(self, server_round: int, base: float | None = None) -> float:
        """Return the learning rate in a round (from 1); ``base`` replaces the rate."""
        rate = self.learning_rate if base is None else base
        return rate * self.schedule.factor_at(server_round)


@dataclass(frozen=True)
class FederationSettings(Settings):
    """Waiting times and limits of a run with clients on other machines.

    Attributes
    ----------
    min_clients
        Number of connected clients at which the first round begins. Null: it begins
        when all registered clients are connected, or after ``wait_for_clients_s`` with
        the clients connected by then.
    wait_for_clients_s
        Longest wait for clients at the start, and before a round with too few connected
        clients. The run then ends.
    grace_s
        Before a round, how long to wait for a client that has just disconnected,
        although enough others are connected.
    max_share
        Largest weight of a client in a round's mean that its own claim of training
        examples gives it: half, as much as all others together. Numbers that the
        operator fixed on registration are not limited.
    max_weight_ratio
        The same limit in multiples of the round's median number of training examples,
        so that several clients together gain little by false claims. Null: no limit.
    clip_median_ratio
        Updates longer than this multiple of the median of the round, or of the last
        rounds, are scaled down to it; null: never. Updates of virtual clients are never
        scaled.
    round_timeout_s
        Time limit of a client's reply. A later client is left out of the round, and its
        training process ends, which frees it for the next round.
    round_patience
        A client times out after this multiple of the median response time (of this
        round or any of the last five) + 30 s, but never before 3 times its own last
        response time. The median is known once most clients of a round have replied.
    round_attempts
        Attempts at a round in which too many clients fail before the run ends.
    distribution_timeout_s
        Time limit of a client for embedding its data and choosing λ after the last
        round; less if the other clients need far less, as in a round.
    stay_s
        How long the server stays up after the model distribution to serve the model to
        offline and new clients.
    """

    min_clients: PositiveInt | None = None
    wait_for_clients_s: NonNegativeFloat = 300.0
    grace_s: NonNegativeFloat = 30.0
    max_share: PositiveFraction = 0.5
    max_weight_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    clip_median_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    round_timeout_s: PositiveFloat = 3600.0
    round_patience: PositiveFloat = 10.0
    round_attempts: PositiveInt = 3
    distribution_timeout_s: PositiveFloat = 3600.0
    stay_s: NonNegativeFloat = 3600.0


@dataclass(frozen=True)
class RunSettings(Settings):
    """Execution of the experiment.

    Results depend on ``seed`` and ``metrics``, and where clients fail on
    ``max_failed_fraction``, ``max_update_norm_ratio`` and ``max_update_median_ratio``.
    Their last bits depend on ``threads_per_worker``, ``evaluation_batch_size`` and
    whether ``gpus_per_client`` is 0. No other setting of this section changes them.

    Attributes
    ----------
    seed
        Fixes partition, initial weights, participation and mini-batches.
    engine
        ``flower`` (virtual clients on Ray) or ``serial`` (one process).
    num_workers
        Worker processes of the ``flower`` engine; null: one per CPU core.
    threads_per_worker
        Threads of torch in one worker. ``auto`` divides the usable CPU cores by the
        number of workers, so that the last bits depend on both numbers.
    cpus_per_client, gpus_per_client
        Resources that Ray reserves for a client while it works. With any fraction of a
        GPU clients compute on it, otherwise on the CPU.
    ray_address
        A Ray cluster to join, as in ``192.168.0.1:6379`` or ``auto``; null starts Ray
        on this machine. A cluster runs as many clients at a time as it has room for.
    carrier
        Transport of models: ``shared_memory`` (files in ``/dev/shm``, on one machine),
        ``object_store`` (Ray's; each machine of a cluster fetches a round's model once)
        or ``message`` (inside each message; models below 128 kB always travel so
        instead of in files). ``auto`` is the first if there is room and no cluster,
        otherwise the second.
    checkpoint_every
        Rounds between checkpoints. A resumed run repeats the rounds since the last.
    validate_every
        Rounds between evaluations on the seen clients' validation splits; 0 is never.
    validate_personal
        Whether these evaluations include the personalised models. Each seen client then
        personalises twice: each half of its validation split is predicted with the
        settings chosen on the other half.
    metrics
        Metrics on the clients' test splits beside those of every run:
        ``balanced_accuracy``, ``macro_f1`` and ``auroc``, or your own functions
        ``(labels (n,), probabilities (n, c)) -> float``, higher being better. Each
        metric listed, also ``log_loss`` or ``ece``, is reported with its spread over
        the clients.
    save_predictions
        Whether to save the probabilities of each test example in
        ``predictions.parquet``; a site saves its own in its state folder. Requires
        ``knnper[tables]``.
    evaluation_batch_size
        Images in one forward pass outside training.
    max_failed_fraction
        Largest fraction of a round's clients that may fail; above it the run ends.
    max_update_norm_ratio
        Longest update that is aggregated, as a multiple of the Euclidean norm of the
        model sent (plus 1). A longer one counts as a failure.
    max_update_median_ratio
        The same as a multiple of the median of the round's updates and of the rounds
        before; null: no limit. A client that is known to have n times the usual number
        of training examples may send an update √n times as long.
    exploding_rounds
        Number of exploding rounds in a row that end the run, with the last good round
        in the message. A round explodes if its median train loss is far above the
        lowest so far, or its median update is longer than the model; it gets no
        checkpoint. 0 is never.
    keep_checkpoints
        Checkpoints to keep: the newest two, and older checkpoints, each about twice as
        far back as the next. States of clients are kept likewise.
    federation
        Settings for clients on other machines.
    """

    seed: NonNegativeInt = 0
    engine: Literal["flower", "serial"] = "flower"
    num_workers: PositiveInt | None = None
    threads_per_worker: PositiveInt | Literal["auto"] = 1
    cpus_per_client: PositiveFloat = 1.0
    gpus_per_client: NonNegativeFloat = 0.0
    ray_address: str | None = None
    carrier: Literal["auto", "shared_memory", "object_store", "message"] = "auto"
    checkpoint_every: PositiveInt = 1
    validate_every: NonNegativeInt = 0
    validate_personal: bool = True
    metrics: tuple[Choice[Settings], ...] = ()
    save_predictions: bool = False
    evaluation_batch_size: PositiveInt = 256
    max_failed_fraction: UnitInterval = 0.5
    max_update_norm_ratio: PositiveFloat = 1000.0
    max_update_median_ratio: PositiveFloat | None = 50.0
    exploding_rounds: NonNegativeInt = 3
    keep_checkpoints: PositiveInt = 6
    federation: FederationSettings = field(default_factory=FederationSettings)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the `metrics` in results."""
        return tuple(metric.metric_name for metric in self.metrics)


@dataclass(frozen=True)
class Experiment:
    """One experiment, validated.

    Attributes
    ----------
    name
        Name of the run folder.
    data, partition, model, method, personalization
        Entries of the catalogue, or the user's code, with their settings.
        ``personalization`` runs at every client after the last round, on top of the
        method.
    training, run
        See `TrainingSettings` and `RunSettings`.
    own_code
        Folder that is searched for ``module:attribute`` before the Python path. In a
        file it is relative to that file, by default the file's folder. Documents sent
        to other machines hold fingerprints instead, by reference.
    """

    name: str
    data: Choice[Settings]
    partition: Choice[Settings]
    model: Choice[Settings]
    training: TrainingSettings
    method: Choice[Settings]
    personalization: Choice[Settings]
    run: RunSettings
    own_code: str | None = None
    # The memory's eviction policy if it is the user's code. The section personalization
    # names it, so that it is no section of its own and not compared.
    policy: Choice[Settings] | None = field(default=None, compare=False)

    def own(self) -> Mapping[str, Choice[Settings]]:
        """Return the parts of the experiment that are the user's code, by section."""
        training = self.training
        chosen = {
            **{name: getattr(self, name) for name in SECTIONS},
            "training.optimizer": training.optimizer,
            "training.loss": training.loss,
            "training.compression": training.compression,
            **{
                f"run.metrics.{metric.metric_name}": metric
                for metric in self.run.metrics
            },
            "personalization.store.policy": self.policy,
        }
        return {
            place: reference
            for place, reference in chosen.items()
            if isinstance(reference, Choice) and is_reference(reference.name)
        }


SECTIONS = tuple(
    field.name for field in dataclasses.fields(Experiment) if field.compare
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
    a copy. ``source``: Name of the document in errors. ``folder``: Searched for users'
    code, and the base of a relative ``own_code``; with None only the Python path is
    searched.
    """
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected the keys {', '.join(SECTIONS)}"
        raise ConfigError([Problem("document", message)], source)
    require_kind(document, "experiment", source)
    problems: list[Problem] = []
    parsed = parse_overrides(overrides, problems)
    merged = apply_overrides(document, parsed, problems)
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
        sections = (name, data, partition, model, training, method)
        if any(section is None for section in (*sections, personalization, run)):
            return None
        experiment = Experiment(*sections, personalization, run)  # type: ignore[arg-type]
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


def is_timed_by_clients(training: TrainingSettings) -> bool:
    """Return whether the order of steps depends on when real clients reply."""
    return training.devices is None and training.timing != SynchronousTiming()


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
    if experiment.own_code is None:
        del document["own_code"]
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
