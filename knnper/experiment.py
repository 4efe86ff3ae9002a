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
    later_defaults,
    parse_overrides,
    plain,
    shown,
    with_overrides,
)
from knnper.yaml_text import dump_yaml, read_yaml

# The keys of each kind of file; the first kind with one of its keys in the file counts.
_KIND_KEYS: Mapping[str, Collection[str]] = {
    "comparison": ("rows", "extends"),
    "sweep": ("random", "variants", "grid"),
    "experiment": ("method", "partition"),
}
_COMMANDS = {"comparison": "compare", "sweep": "sweep", "experiment": "simulate"}
# How to turn an experiment into a file of the expected kind.
_FROM_AN_EXPERIMENT = {
    "sweep": "name it in a sweep, experiment: FILE, with what to vary, as in grid: "
    "{training.learning_rate: [0.01, 0.1]}",
    "comparison": "put its data, partition, model and training into the section base "
    "of a comparison and each method into rows; knnper init FOLDER --compare makes one "
    "to start from",
}
_NUMERIC = (
    "seed",
    "max_failed_fraction",
    "max_update_norm_ratio",
    "threads_per_worker",
    "evaluation_batch_size",
)


@dataclass(frozen=True)
class ConstantSchedule(Settings):
    """The learning rate stays what it is."""

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
        What the rate is multiplied with at each milestone; 0.1 in the paper.
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
    """How fast clients are in virtual time, and when they are there.

    Speeds and links are log-normal over the clients, each client's the same in all
    rounds.

    Attributes
    ----------
    examples_per_s
        Examples that the median client trains the whole model on in a second.
    speed_spread
        Ratio of the fastest to the slowest of the middle 95 % of clients; 1 makes all
        alike.
    bytes_down_per_s, bytes_up_per_s
        Of the median client's link: what it is sent, and what it sends, is its model,
        the latter less what ``training.compression`` saves. With null it takes no time.
    link_spread
        As ``speed_spread``, of the links.
    available
        Part of the time that a client is available, (0, 1].
    period_s
        Mean time from one going away to the next; both parts are exponential.
    trace
        A file of CSV or JSON with measured devices, of which each client has one, drawn
        at random: its speed, its link and when it is there, as far as the file says it.
    availability_trace
        The same with when devices are there, where that is in a file of its own.
    """

    later = ("trace", "availability_trace")

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
        Clients that are asked, as a multiple of those that are needed: a round ends
        when ``participation`` of all have answered.
    deadline_s
        A round ends at the latest after this time, with those who have
        answered, or with the first one; null waits.
    """

    name: Literal["synchronous"] = "synchronous"
    over_selection: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    deadline_s: PositiveFloat | None = None


@dataclass(frozen=True)
class BufferedTiming(Settings):
    """The server makes a step of every few answers (FedBuff, Nguyen et al. 2022).

    ``participation`` of the clients train at any time. When one answers, another one
    begins, with the model of that moment. ``num_rounds`` counts the steps.

    Attributes
    ----------
    buffer_size
        K, the answers of which a step is made.
    staleness_exponent
        a of the factor (1 + τ)^-a on the change of a client during whose training τ
        steps were made.
    server_rate
        η of the server, a factor on all changes.
    """

    name: Literal["buffered"] = "buffered"
    buffer_size: PositiveInt = 10
    staleness_exponent: NonNegativeFloat = 0.5
    server_rate: PositiveFloat = 1.0


@dataclass(frozen=True)
class UniformSelection(Settings):
    """Each client that could take part is as likely."""

    name: Literal["uniform"] = "uniform"


@dataclass(frozen=True)
class UtilitySelection(Settings):
    """Clients of which much is learnt in little time are likelier (Lai et al. 2021).

    Attributes
    ----------
    exploration, exploration_decay, min_exploration
        ε, the part of the clients of the first round that are drawn uniformly; the
        factor on it in each further round, and where it ends. 1, 1 is ``uniform``.
    staleness_weight
        b of the bonus sqrt(b ln R / L) in round R of a client that took part in
        round L last.
    preferred_quantile, straggler_exponent
        With ``devices``: T, the time that this part of the clients need at most for a
        round, and α of the factor (T / t)^α on the utility of one that needs t > T.
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
        As of ``torch.optim.SGD``.
    """

    dampening: NonNegativeFloat = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """How the clients train together.

    Attributes
    ----------
    num_rounds
        Communication rounds, T.
    participation
        Fraction of the seen clients with data that take part in a round, (0, 1].
    local_epochs, local_steps
        Length of a client's training in one round; give one of the two. With neither,
        one epoch.
    batch_size
        Examples in a mini-batch. The incomplete last batch is left out when there is
        a full one before it.
    learning_rate
        Local SGD's rate, η; the paper's grid is 10^-0.5 ... 10^-2.5.
    momentum, weight_decay
        Of local SGD; the momentum buffer starts from zero in every round.
    augmentation
        What happens to the images of a mini-batch at random: nothing, a horizontal
        flip, or a crop of the image in a black frame of 4 pixels and a flip.
    precision
        Of forward and backward passes, in training and in evaluation. With
        ``bfloat16`` weights and sums stay float32. ``auto`` is for a simulation: when
        it begins it times steps in both on its own processor, and takes the faster.
    schedule
        Factor on the learning rate as a function of the round.
    optimizer
        One of torch's by its name with its settings, such as ``{name: AdamW, eps:
        1e-6}``, or one of your own. It starts anew in every round. SGD takes
        ``momentum`` and ``weight_decay`` of this section, any other its own.
    loss
        ``cross_entropy``, or a function of your own ``(logits (n, c), labels (n,)) ->``
        the loss of each example (n,), or their mean. A class, such as
        ``torch.nn:MultiMarginLoss``, is made with its settings first.
    class_weights
        Factor on the loss of an example by its label: one for each label, or
        ``balanced``, inversely to how often a client has the label; null is 1.
    clip_norm
        Gradients of the loss that are longer are cut to this Euclidean norm; null cuts
        none.
    compression
        What clients send of their updates: ``top_k``, ``quantize`` or ``sign`` with its
        settings, such as ``{name: top_k, fraction: 0.01}``, or one of your own; null
        sends every number in four bytes.
    devices
        How fast clients are and when they are there, in virtual time; null has none.
    timing
        Whether the server waits for a round's clients, ``synchronous``, or makes a step
        of every few answers, ``buffered``.
    selection
        How the clients of a round are drawn: each as likely, ``uniform``, or by
        ``utility``, from which much is learnt in little time.
    """

    later = (
        *("optimizer", "loss", "class_weights", "clip_norm", "compression"),
        *("devices", "timing", "selection"),
    )

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
        """Return what the learning rate, or another, is in a round (from 1)."""
        rate = self.learning_rate if base is None else base
        return rate * self.schedule.factor_at(server_round)


@dataclass(frozen=True)
class FederationSettings(Settings):
    """How long a run with clients on machines of their own waits for them.

    Attributes
    ----------
    min_clients
        The first round begins as soon as so many are there. With null, when all that
        are registered are there, or after ``wait_for_clients_s`` with those who came.
    wait_for_clients_s
        Longest wait for clients, at the start and before any round of whose clients
        too few are connected; then the run ends.
    grace_s
        Before a round, how long a client of it that has just been lost is waited for
        although enough others are there.
    max_share
        The largest part of a round's mean that a client gets by the number of training
        examples that it says it has: half, as much as all others together. A number
        that the operator fixed when it let the client in is taken as it is.
    max_weight_ratio
        The same limit in multiples of the median number of training examples in the
        round, so that several clients together gain little by claims; null is any.
    clip_median_ratio
        An update that moves the model farther than this many times the median of the
        round, or of the last rounds, is shortened to that; null shortens none. Virtual
        clients are never shortened.
    round_timeout_s
        A client that has not answered after this time is left out of the round. Its
        own process ends itself then, and is free for the next one.
    round_patience
        So it is after this many times the median time of the clients in this round, or
        in one of the last five, and half a minute more, if that is earlier; or after
        three times as long as it took itself the last time, if that is later. The
        median is known once most of a round have answered.
    round_attempts
        Times that a round in which too many clients fail is made before the run ends.
    distribution_timeout_s
        Time that a client has to embed its data and to choose λ after the last round;
        less where the others need far less, as in a round.
    stay_s
        How long the server stays after the model distribution, to give the model to
        clients that come later or were offline.
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
    """How the experiment is carried out.

    Results depend on ``seed`` and ``metrics``, and where clients fail on
    ``max_failed_fraction``, ``max_update_norm_ratio`` and ``max_update_median_ratio``;
    in their last bits on
    ``threads_per_worker``, on ``evaluation_batch_size`` and on whether
    ``gpus_per_client`` is 0; on nothing else here.

    Attributes
    ----------
    seed
        Fixes partition, initial weights, participation and mini-batches.
    engine
        ``flower`` (virtual clients on Ray) or ``serial`` (one process).
    num_workers
        Worker processes of the ``flower`` engine; null is one a CPU core.
    threads_per_worker
        Threads torch may use in one worker; ``auto`` shares the usable CPU cores out
        between the workers, so that the last bits depend on both numbers.
    cpus_per_client, gpus_per_client
        What Ray reserves for a client while it works. With any part of a GPU, clients
        compute on it; else on the CPU.
    ray_address
        A Ray cluster to join, as in ``192.168.0.1:6379`` or ``auto``; null starts Ray
        on this machine. A cluster runs as many clients at a time as it has room for.
    carrier
        How models travel: ``shared_memory`` (as files in ``/dev/shm``, on one machine),
        ``object_store`` (Ray's, of which each machine of a cluster fetches a round's
        model once) or ``message`` (in each message, as what has less than 128 kB always
        does where there would be files). ``auto`` is the first where there is room and
        no cluster, else the second.
    checkpoint_every
        Rounds between checkpoints. A resumed run repeats the rounds since the last.
    validate_every
        Rounds between evaluations on the seen clients' validation splits; 0 is never.
    validate_personal
        Whether these are of the personalised models too, beside the unpersonalised one.
        Each seen client then personalises twice: each half of its validation split is
        predicted by what was chosen on the other half.
    metrics
        What clients are measured by on their test splits, beside what every run has:
        ``balanced_accuracy``, ``macro_f1`` and ``auroc``, or functions of your own
        ``(labels (n,), probabilities (n, c)) -> float``, higher being better; each that
        is named, also ``log_loss`` or ``ece``, with its spread over the clients.
    save_predictions
        Whether the probabilities of each test example are kept, in
        ``predictions.parquet``; a site keeps its own in its state folder. It needs
        ``knnper[tables]``.
    evaluation_batch_size
        Images in one forward pass where nothing is trained.
    max_failed_fraction
        A round in which a larger part of the clients fails ends the run.
    max_update_norm_ratio
        An update that differs from what the client was sent by more than this many
        times the Euclidean norm of that (plus 1) is not aggregated: it counts as a
        failure.
    max_update_median_ratio
        The same for one that differs by more than this many times the median of the
        round's updates and of the rounds before; null takes any. A client whose number
        of training examples is known to be n times the usual one may differ by √n times
        as much.
    exploding_rounds
        A training ends after so many rounds in a row in which it explodes, and names
        the last good round: their median train loss is far above the lowest one so far,
        or the median update is longer than the model. They get no checkpoint. 0 is
        never.
    keep_checkpoints
        Checkpoints that are kept: the newest two, and older ones each about twice as
        far back as the next. So are the states of clients that have one.
    federation
        What concerns clients on machines of their own alone.
    """

    later = ("max_update_median_ratio", "metrics")

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
        """What results call the `metrics`."""
        return tuple(metric.metric_name for metric in self.metrics)


@dataclass(frozen=True)
class Experiment:
    """One experiment, validated.

    Attributes
    ----------
    name
        Names the run folder.
    data, partition, model, method, personalization
        What was chosen by name, with its settings; ``personalization`` is what every
        client does after the last round, on top of what the method gives it.
    training, run
        See `TrainingSettings` and `RunSettings`.
    own_code
        Folder in which ``module:attribute`` is looked for before the Python path. In a
        file it is relative to that, and by default its own folder. What is sent to
        others has fingerprints instead, by reference.
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
    # What says which examples a memory keeps, where it is a user's; it is named in the
    # section personalization.
    policy: Choice[Settings] | None = field(default=None, compare=False)

    def own(self) -> Mapping[str, Choice[Settings]]:
        """Return what of it is a user's, by section."""
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
    """The names that exist and the settings that each takes."""

    # From the names that a section accepts to the type of its other keys.
    data: SettingsTypes
    partition: SettingsTypes
    model: SettingsTypes
    method: SettingsTypes
    personalization: SettingsTypes
    # From a method's name to that of its personalisation where none is named.
    personalization_of: Mapping[str, str]
    # Finds what in an otherwise valid experiment does not go together.
    check: Callable[[Experiment], Sequence[Problem]]
    # Finds what a user brought; an `OwnCodeError` says why it is not there.
    open_own: OpenOwn | None = None
    # As the first ones, of the sections ``training`` and ``run``.
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
    """Return the experiment that the YAML file at ``path`` describes."""
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
    """Return the experiment that ``document``, of plain values, describes.

    A `ConfigError` has *all* problems: unknown keys and names (with the nearest valid
    one), values of a wrong type or out of range, missing keys, and settings that do not
    go together.

    ``overrides``: ``KEY=VALUE`` with a dotted key and a YAML value; made in order on a
    copy. ``source``: Named in errors. ``folder``: Where users' code is looked for, and
    what a relative ``own_code`` starts at; with None nowhere but on the Python path.
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
        """Return the experiment; None when a section of it is wrong."""
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
        """Return what says which examples are kept, if it is a user's."""
        for place, value in dotted(plain(personalization)):
            if place.endswith("store.policy") and is_reference(value):
                return self.own_choice("personalization.store.policy", str(value), {})
        return None

    def _training(self, catalogue: Catalogue) -> TrainingSettings | None:
        """Return the section ``training``, in which some things are chosen by name."""
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
        """Return the section ``run``, in which metrics are chosen by name."""
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
                message = f"found {metric.metric_name} twice, expected different names"
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
            "expected a name for the run's folder: letters, digits, '.', '_' and '-', "
            f"a letter or digit first; found {shown_name}"
        )
        self.add_problem("name", message)
        return None

    def _personalization(
        self, catalogue: Catalogue, method: Choice[Settings] | None
    ) -> Choice[Settings] | None:
        """Return what is put on top of the method; None without a method."""
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
    """Return whether steps follow from when real clients answer."""
    return training.devices is None and training.timing != SynchronousTiming()


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
    if isinstance(training.timing, BufferedTiming) and not isinstance(
        training.selection, UniformSelection
    ):
        message = (
            f"found {training.selection.name} with timing = buffered, whose clients "
            "are drawn one by one, expected uniform; leave one of the two out"
        )
        yield Problem("training.selection", message)
    optimizer = training.optimizer.name
    for name in ("momentum", "weight_decay"):
        if optimizer != "SGD" and getattr(training, name):
            message = (
                f"found {getattr(training, name)}, which is SGD's, with {optimizer}; "
                f"give what it takes in training.optimizer, or leave {name} out"
            )
            yield Problem(f"training.{name}", message)
    sgd = training.optimizer.settings
    if (
        isinstance(sgd, SgdSettings)
        and sgd.nesterov
        and (not training.momentum or sgd.dampening)
    ):
        message = "found true, expected training.momentum with it, and no dampening"
        yield Problem("training.optimizer.nesterov", message)
    if isinstance(training.schedule, MultiStepSchedule):
        milestones = training.schedule.milestones
        if any(b <= a for a, b in itertools.pairwise(milestones)):
            message = f"found {shown(milestones)}, expected increasing rounds"
            yield Problem("training.schedule.milestones", message)


def to_document(experiment: Experiment) -> dict[str, Any]:
    """Return every setting of ``experiment``, defaults too, as plain values."""
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
    """Return the experiment of which `to_json` made ``text``."""
    try:
        document = parse_json(text)
    except ValueError as error:
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
    run = {name: document["run"][name] for name in (*_NUMERIC, *RunSettings.later)}
    for name in later_defaults(experiment.run):
        del run[name]
    run["gpu"] = experiment.run.gpus_per_client > 0
    left_out = ("name", "run", "own_code")
    relevant = {key: document[key] for key in document if key not in left_out}
    for section, values in relevant.items():
        for name in later_defaults(getattr(experiment, section)):
            del values[name]
    if (devices := experiment.training.devices) is not None:
        for name in later_defaults(devices):
            del relevant["training"]["devices"][name]
    # They follow from the rest, and are known only once the model is built.
    for name in ("frozen", "memory_format"):
        relevant["model"].pop(name, None)
    if own_code := experiment.own():
        relevant["own_code"] = {
            place: reference.fingerprint for place, reference in own_code.items()
        }
    return {**relevant, "run": run}
