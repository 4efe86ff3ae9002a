"""An audit: the attacks on a target, and its record ``audit.json``."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.server.run_folder import environment
from knnper.simulation.audit.figures import CONFIDENCE, AttackResult

FILE = "audit.json"
Attack = Callable[[Sequence[str], RandomKey], Iterable[AttackResult]]
"""``(names, key) -> results``: makes the named attacks, which share observations."""


@dataclass(frozen=True)
class Target(ABC):
    """Something that can be attacked.

    Attributes
    ----------
    facts
        Facts on the target by name, as plain values, such as its address.
    """

    facts: Mapping[str, Any]

    @property
    @abstractmethod
    def attacks(self) -> Mapping[str, Attack]:
        """The attacks that apply, by name, in the order of the record."""


@dataclass(frozen=True)
class Audit:
    """The record of an audit.

    Attributes
    ----------
    facts
        Of the `Target`.
    results
        One for each attack and surface.
    seed
        Of all random choices of the audit.
    date
        UTC, in ISO 8601.
    environment
        Versions and machine.
    confidence
        Of all intervals and bounds.
    """

    facts: Mapping[str, Any]
    results: tuple[AttackResult, ...]
    seed: int
    date: str
    environment: Mapping[str, Any]
    confidence: float = CONFIDENCE


AUDIT = TypeAdapter(Audit)


def audit_target(target: Target, attacks: Sequence[str], seed: int) -> Audit:
    """Make the named attacks on a target."""
    key, table = RandomKey(seed, ("audit",)), target.attacks
    chosen = [name for name in table if name in attacks]
    results = [
        result
        for attack, names in itertools.groupby(chosen, table.__getitem__)
        for result in attack([*names], key)
    ]
    return Audit(
        facts=target.facts,
        results=tuple(results),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(),
    )


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
