"""Where the runs come from, how to repeat them, and whether they can be compared."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from knnper.config.yaml_text import dump_yaml
from simulation.reporting.runs import Run
from simulation.reporting.setups import Setup

_UNKNOWN = "not known"


@dataclass(frozen=True)
class Origin:
    """How one run was made.

    Attributes
    ----------
    run, seed, started
        The name of its folder, its seed, and when it began.
    command
        What was typed.
    partition_hash, state_sha256
        Fingerprints of the split, and of the server's last state.
    """

    run: str
    seed: str
    started: str
    command: str
    partition_hash: str
    state_sha256: str


@dataclass(frozen=True)
class Repetition:
    """How to repeat the runs of a setup.

    Attributes
    ----------
    label
        The setup's.
    origins
        One a run.
    commands
        Make each run anew from the file ``experiment.yaml``.
    experiment
        Content of that file; empty where the runs do not tell.
    """

    label: str
    origins: tuple[Origin, ...]
    commands: tuple[str, ...]
    experiment: str


def repetition_of(setup: Setup) -> Repetition:
    """Return how the runs of a setup were made."""
    seeds = [run.seed for run in setup.runs if run.seed is not None]
    experiment = setup.runs[0].experiment
    return Repetition(
        label=setup.label,
        origins=tuple(_origin(run) for run in setup.runs),
        commands=tuple(
            f"knnper simulate experiment.yaml --set run.seed={seed} "
            f"--output runs/again-{seed}"
            for seed in seeds
        ),
        experiment=dump_yaml(experiment) if experiment else "",
    )


def environments(runs: Sequence[Run]) -> list[str]:
    """Return with what the runs were made, each with how many of them."""
    counts = Counter(environment_text(run.manifest) for run in runs)
    if len(counts) == 1:
        return list(counts)
    return [f"{text} ({count} of the runs)" for text, count in counts.items()]


def comparability(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on what makes the setups hard to compare."""
    if len({tuple(run.seed for run in setup.runs) for setup in setups}) > 1:
        yield (
            "Not all setups have the same seeds; their means are over different splits "
            "of the data."
        )
    splits: dict[int | None, set[str]] = defaultdict(set)
    for run in (run for setup in setups for run in setup.runs):
        splits[run.seed].add(str(run.manifest.get("partition_hash")))
    if any(len(hashes) > 1 for hashes in splits.values()):
        yield (
            "Runs with the same seed have different splits of the data: compare their "
            "averages with care, and their clients not at all."
        )
    for setup in setups:
        yield from _missing_clients(setup)


def _missing_clients(setup: Setup) -> Iterator[str]:
    for run in setup.runs:
        hand_over = run.results.get("hand_over", {})
        num_withheld = len(hand_over.get("withheld", ()))
        num_away = len(hand_over.get("away", ()))
        if num_withheld or num_away:
            yield (
                f"{run.name}: {num_withheld} clients keep their figures to themselves, "
                f"{num_away} did not have the model yet; they are in no figure."
            )


def _origin(run: Run) -> Origin:
    manifest = run.manifest
    return Origin(
        run=run.name,
        seed=_UNKNOWN if run.seed is None else str(run.seed),
        started=str(manifest.get("started", _UNKNOWN)),
        command=shlex.join(manifest.get("command", ())) or _UNKNOWN,
        partition_hash=str(manifest.get("partition_hash", _UNKNOWN)),
        state_sha256=str(run.results["training"].get("state_sha256", _UNKNOWN)),
    )


def environment_text(manifest: Mapping[str, Any]) -> str:
    """Return the versions and the machine of a manifest as a phrase."""
    versions = manifest.get("versions", {})
    packages = (f"{name} {version}" for name, version in versions.items() if version)
    machine = manifest.get("platform", _UNKNOWN)
    cores = manifest.get("num_cpus", "?")
    return f"{', '.join(packages) or _UNKNOWN}; {machine}; {cores} CPU cores"
