"""One client, as its YAML file describes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from knnper.data.catalogue import SITE_DATA
from knnper.data.own_data import OWN_SITE_DATA
from knnper.datastore.private_answers import Delta, PrivateAnswerSettings
from knnper.errors import ConfigError, Problem
from knnper.models import MODELS
from knnper.own import Door, MachineSettings
from knnper.settings import (
    Choice,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    Own,
    PositiveFloat,
    PositiveInt,
    SectionReader,
    Settings,
    apply_overrides,
    one_of,
    parse_overrides,
    parse_settings,
    shown,
)
from knnper.strategies.catalogue import METHODS
from knnper.transport.credentials import Address, parse_address
from knnper.yaml_text import read_yaml

Port = Annotated[int, Field(ge=0, le=65535)]
MethodName = Annotated[str, one_of(METHODS)]
ModelName = Annotated[str, one_of(MODELS)]
Shared = Literal["metrics", "counts", "label_shares"]
Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class SitePrivacySettings(Settings):
    """Local differential privacy of a site, whatever a run asks for.

    The unit is the site's whole data set: its updates are nearly as likely with any
    other, including one that differs in a single example. Each update u, the difference
    from the model received, is sent as u min(1, S / ‖u‖) plus Gaussian noise of
    standard deviation σ S for each of its d numbers. Two data sets move the clipped
    update by at most 2 S, so ε is that of a Gaussian mechanism with the noise
    multiplier σ / 2.

    The cost: the norm of the noise is about σ S √d, and at most S is signal. The noise
    of n sites of equal weight averages to σ S √(d / n). The page on privacy has
    figures.

    Attributes
    ----------
    clip_norm
        S, the largest norm of an update; useful near the norm of usual updates, from
        0.1 to 10. Null neither clips nor adds noise: only ``share`` applies.
    noise_multiplier
        σ, required with ``clip_norm``; useful from 1 (little privacy) to 100. 0 clips
        alone, and ε is infinite.
    epsilon_run
        Most ε of one experiment, all its runs together; null is any.
    epsilon_year
        Most ε within the last 365 days, over all experiments; null is any.
    delta
        δ of every ε; useful below 1 / the number of examples.
    share
        What may leave beside protected updates; ε covers none of it. ``metrics``:
        losses, accuracies and ``run.metrics``, which contain numbers of examples;
        ``share_metrics: false`` also withholds them. ``counts``: numbers of examples.
        ``label_shares``: the frequency of each label, which the updates of some methods
        contain; without it the site rejects these methods.
    weight
        The number of training examples to report without shared ``counts``, so that all
        the site's updates weigh the same.
    """

    clip_norm: PositiveFloat | None = None
    noise_multiplier: NonNegativeFloat | None = None
    epsilon_run: PositiveFloat | None = None
    epsilon_year: PositiveFloat | None = None
    delta: Delta = 1e-5
    share: tuple[Shared, ...] = ()
    weight: PositiveInt = 1

    @property
    def fixed_weight(self) -> int | None:
        """The weight that hides numbers of examples; None if they may leave."""
        return None if "counts" in self.share else self.weight

    @property
    def noise(self) -> float:
        """The noise multiplier σ; 0 without noise."""
        return self.noise_multiplier or 0.0

    def problems(self) -> Iterator[Problem]:
        """Yield the contradictions between these settings."""
        if (self.clip_norm is None) != (self.noise_multiplier is None):
            yield Problem(
                "limits.privacy",
                "found one of clip_norm and noise_multiplier, expected both, such as "
                "1.0 and 50; a noise_multiplier of 0 clips alone, and gives no epsilon",
            )
        if (self.epsilon_run or self.epsilon_year) and not self.noise:
            yield Problem(
                "limits.privacy",
                "found a budget without noise, but without noise one update spends "
                "an infinite epsilon; set noise_multiplier, or remove the budget",
            )
        if "metrics" in self.share and "counts" not in self.share:
            yield Problem(
                "limits.privacy.share",
                "found metrics without counts, but metrics contain numbers of "
                "examples; share both or none",
            )


@dataclass(frozen=True)
class LimitSettings(Settings):
    """Limits of every run at this site; measured in docs/security.md.

    Attributes
    ----------
    min_examples, min_steps
        Behind every update: different training examples, and steps of local training,
        both as counted at the site.
    methods, models
        Methods and models that a run may use, `own_code` included; null is all.
    experiment
        Fingerprint of the only experiment to take part in, as ``knnper site check
        --task`` prints it; null is any.
    training_rounds, validation_rounds
        Most answers within the last ``days`` days, over all runs together: updates, and
        answers with metrics. Null is any number.
    days
        Null counts all answers ever given.
    privacy
        See `SitePrivacySettings`; null adds nothing to updates and withholds nothing.
    """

    min_examples: PositiveInt = 32
    min_steps: PositiveInt = 1
    methods: tuple[MethodName, ...] | None = None
    models: tuple[ModelName, ...] | None = None
    experiment: Fingerprint | None = None
    training_rounds: NonNegativeInt | None = 1000
    validation_rounds: NonNegativeInt | None = 100
    days: PositiveInt | None = 30
    privacy: SitePrivacySettings | None = None


@dataclass(frozen=True)
class ServerTrust(Settings):
    """How the client authenticates the server.

    Attributes
    ----------
    ca
        Certificate of the authority that signed the server's certificate, as PEM.
    """

    ca: Path


@dataclass(frozen=True)
class ServiceCertificate(Settings):
    """Certificate and key of the service, for TLS.

    Attributes
    ----------
    certificate, key
        PEM files.
    """

    certificate: Path
    key: Path


@dataclass(frozen=True)
class ServiceSettings(Settings):
    """Address and limits of the prediction service.

    Attributes
    ----------
    host, port
        Where the service listens; port 0 is any free one.
    max_request_mb
        Largest body of a request, in 10^6 bytes; a larger one is refused.
    max_megapixels
        Of all images of a request before they are resized, in 10^6 pixels.
    max_seconds
        Seconds in which a request's work has to begin, and a prediction to end.
    tls
        Null is plain HTTP, for this machine only.
    privacy
        See `PrivateAnswerSettings`; null answers without noise, and shows neighbours.
    """

    host: str = "127.0.0.1"
    port: Port = 8080
    max_request_mb: PositiveInt = 16
    max_megapixels: PositiveInt = 50
    max_seconds: PositiveInt = 30
    tls: ServiceCertificate | None = None
    privacy: PrivateAnswerSettings | None = None

    @property
    def address(self) -> Address:
        """Where the service listens."""
        return Address(self.host, self.port)


@dataclass(frozen=True)
class ClientDocument(MachineSettings):
    """A client's file without the section ``data``.

    Attributes
    ----------
    name
        The client's name in the federation; it belongs to its key.
    server
        ``HOST:PORT`` of the federation's gateway.
    tls
        How to authenticate the server; None with ``insecure``.
    key
        The client's private key, OpenSSH; None with ``insecure``.
    insecure
        Talk to the server without TLS and without a key.
    state
        Folder of the client's models, memory and records.
    train
        Whether the client takes part in training; else it only gets the model.
    share_metrics
        Whether metrics are sent, beyond the counts that aggregation needs.
    limits
        See `LimitSettings`.
    own_code, pretrained
        The site's own code and files that an experiment may use; an experiment brings
        none. See `OwnCodeSettings` and `MachineSettings`.
    service
        See `ServiceSettings`.
    """

    name: Name
    server: str
    tls: ServerTrust | None = None
    key: Path | None = None
    insecure: bool = False
    state: Path = Path("state")
    train: bool = True
    share_metrics: bool = True
    limits: LimitSettings = field(default_factory=LimitSettings)
    service: ServiceSettings = field(default_factory=ServiceSettings)


@dataclass(frozen=True, kw_only=True)
class ClientSettings(ClientDocument):
    """One client, validated; all paths but those of ``data`` are absolute.

    Attributes
    ----------
    file
        The YAML file.
    data
        Source of its examples: a name of `SITE_DATA` and its settings; paths are
        relative to `base`.
    """

    file: Path
    data: Choice[Settings]

    @property
    def fixed_weight(self) -> int | None:
        """See `SitePrivacySettings.fixed_weight`."""
        privacy = self.limits.privacy
        return None if privacy is None else privacy.fixed_weight

    @property
    def base(self) -> Path:
        """The file's folder: relative paths start there."""
        return self.file.parent

    @property
    def cache(self) -> Path:
        """Folder of decoded inputs; it may be removed."""
        return self.state / "cache"


def read_client(path: Path, overrides: Sequence[str] = ()) -> ClientSettings:
    """Read a client's YAML file.

    Whether the files that it names exist is not checked.

    Raises
    ------
    ConfigError
        With all problems at once.
    """
    file = path.absolute()
    document = read_yaml(file, "give the path of a client's YAML file")
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected keys such as name, server, data"
        raise ConfigError([Problem("document", message)], str(file))
    problems: list[Problem] = []
    merged = apply_overrides(document, parse_overrides(overrides, problems), problems)
    section = {"data": merged.pop("data")} if "data" in merged else {}

    def open_own(_section: str, reference: str, _folder: Path | None) -> Own:
        return Door(file.parent).open(reference, OWN_SITE_DATA)

    data = SectionReader(section, (), problems, open_own).choice("data", SITE_DATA)
    parsed = parse_settings(ClientDocument, merged, "", problems)
    if parsed is not None:
        problems.extend(_contradictions(parsed))
    if parsed is None or data is None or problems:
        raise ConfigError(problems, str(path))
    base = file.parent
    privacy = parsed.limits.privacy
    shares_metrics = privacy is None or "metrics" in privacy.share
    tls = parsed.service.tls
    if tls is not None:
        tls = ServiceCertificate(base / tls.certificate, base / tls.key)
    absolute = {
        "tls": None if parsed.tls is None else ServerTrust(base / parsed.tls.ca),
        "key": None if parsed.key is None else base / parsed.key,
        "state": base / parsed.state,
        "share_metrics": parsed.share_metrics and shares_metrics,
        "service": replace(parsed.service, tls=tls),
        **parsed.at(base),
    }
    return ClientSettings(file=file, data=data, **{**vars(parsed), **absolute})


def _contradictions(document: ClientDocument) -> Iterator[Problem]:
    try:
        parse_address(document.server)
    except ValueError as error:
        yield Problem("server", str(error))
    for name, example in (("tls", "{ca: ca.crt}"), ("key", "client.key")):
        is_given = getattr(document, name) is not None
        if document.insecure and is_given:
            message = f"found together with insecure: true; remove `{name}`, or that"
            yield Problem(name, message)
        elif not document.insecure and not is_given:
            yield Problem(
                name,
                f"found none, expected one such as `{name}: {example}`; what the "
                "federation's operator gave you, or `insecure: true` for a trial on "
                "one machine",
            )
    if document.limits.privacy is not None:
        yield from document.limits.privacy.problems()
