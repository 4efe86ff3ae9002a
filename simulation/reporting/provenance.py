"""Where the runs come from, and how to repeat them."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
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
    file
        A file name for ``experiment`` that no other setup of the report has.
    commands
        Make each run anew from that file, each in a folder of its own.
    experiment
        All settings, as the content of the file; empty where the runs do not tell.
    """

    label: str
    origins: tuple[Origin, ...]
    file: str
    commands: tuple[str, ...]
    experiment: str


def repetition_of(setup: Setup, label: str, number: int) -> Repetition:
    """Return how the runs of a setup, the ``number``-th of a report, were made.

    Parameters
    ----------
    setup
        The runs.
    label
        What the report calls the setup.
    number
        From 1.
    """
    file = f"experiment-{number}.yaml"
    seeds = [run.seed for run in setup.runs if run.seed is not None]
    experiment = setup.runs[0].experiment
    return Repetition(
        label=label,
        origins=tuple(_origin(run) for run in setup.runs),
        file=file,
        commands=tuple(
            f"knnper simulate {file} --set run.seed={seed} "
            f"--output runs/again-{number}-seed-{seed}"
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
