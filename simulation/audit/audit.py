"""An audit: the attacks on a target, and its record ``audit.json``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from knnper.errors import RunError
from knnper.files import write_atomically
from knnper.seeding import RandomKey
from knnper.server.run_folder import environment
from knnper.simulation.audit.figures import CONFIDENCE, AttackResult

FILE = "audit.json"
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Target(ABC):
    """Something that can be attacked.

    Attributes
    ----------
    kind
        ``run`` or ``service``.
    attacks
        Names of the attacks that apply.
    facts
        Facts on the target by name, such as its address.
    """

    kind: ClassVar[str]
    attacks: ClassVar[Sequence[str]]

    facts: Mapping[str, str]

    @abstractmethod
    def num_steps(self, attacks: Sequence[str]) -> int:
        """Return the number of steps that `results` reports."""

    @abstractmethod
    def results(
        self, attacks: Sequence[str], key: RandomKey, on_step: OnStep
    ) -> Iterator[AttackResult]:
        """Attack; ``on_step`` is called with the number of steps that were made."""


@dataclass(frozen=True)
class Audit:
    """The record of an audit.

    Attributes
    ----------
    kind, facts
        Of the `Target`.
    results
        One for each attack and surface.
    seed
        Of all random choices of the audit.
    date
        UTC, in ISO 8601.
    command
        The command line.
    environment
        Versions and machine.
    confidence
        Of all intervals and bounds.
    """

    kind: str
    facts: Mapping[str, str]
    results: tuple[AttackResult, ...]
    seed: int
    date: str
    command: tuple[str, ...]
    environment: Mapping[str, Any]
    confidence: float = CONFIDENCE


AUDIT = TypeAdapter(Audit)


def audit_target(
    target: Target,
    attacks: Sequence[str],
    seed: int,
    on_step: OnStep = lambda _: None,
    command: Sequence[str] = (),
) -> Audit:
    """Make all attacks on a target."""
    results = target.results(attacks, RandomKey(seed, ("audit",)), on_step)
    return Audit(
        kind=target.kind,
        facts=target.facts,
        results=tuple(results),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(command),
        environment=environment(),
    )


def write_audit(path: Path, audit: Audit) -> None:
    """Write the record of an audit as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, AUDIT.dump_json(audit, indent=2) + b"\n")


def read_audit(path: Path) -> Audit | None:
    """Read the record of an audit; None if there is none."""
    try:
        return AUDIT.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise RunError(
            f"{path} cannot be read as a record of an audit ({error}); remove it, or "
            "audit again: knnper audit"
        ) from error
