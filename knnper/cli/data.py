"""``knnper data``: a site's own data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from knnper.cli.errors import RUN_FAILED
from knnper.cli.options import AsJson, Overrides
from knnper.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from client.settings import ClientSettings
    from knnper.config.sections import Experiment
    from knnper.data.site.check import DataCheck
    from knnper.data.site.duplicates import Conflicts, Copies

_MOST_SHOWN = 10

data = typer.Typer(
    name="data", no_args_is_help=True, help="Look at this site's own data."
)

ClientFile = Annotated[
    Path,
    typer.Option("--config", metavar="CLIENT.yaml", help="The client's file."),
]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="EXPERIMENT.yaml|MODEL",
        help="What the federation agreed on: the experiment that was submitted, or "
        "the folder of an exported model. Without it, the data speaks for itself.",
    ),
]


@data.callback()
def root() -> None:
    """Look at this site's own data."""


@data.command()
def check(
    config: ClientFile,
    task: TaskFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what a client's data holds, and whether it can be learned from.

    With an experiment as the task, also its fingerprint, and whether the client's
    limits allow it. Nothing leaves this machine. The exit code is 1 when training
    cannot work, or when training and test data overlap.
    """
    # Everything below loads torch, which `knnper --help` need not wait for.
    from client.settings import read_client
    from knnper.data.site.catalogue import survey_site
    from knnper.data.site.check import check_site
    from knnper.data.site.task_file import read_task

    settings = read_client(config, overrides or ())
    agreed = None if task is None else read_task(task)
    found = check_site(survey_site(settings.data, settings.base, agreed))
    experiment = None if task is None else _experiment(task)
    asked: dict[str, object] = {}
    if experiment is not None:
        num_train = found.splits["train"].num_examples
        asked = _asked(settings, experiment, num_train)
    if as_json:
        print_json(
            {"client": settings.name, "sent": False, **found.document(), **asked}
        )
    else:
        typer.echo(f"client: {settings.name}")
        _show(found, with_task=agreed is not None)
        _show_asked(asked)
    if found.problems or asked.get("refused"):
        raise typer.Exit(RUN_FAILED)


def _experiment(task: Path) -> "Experiment | None":
    """Return the experiment as the sites see it; None where the file holds none."""
    from knnper.config.loading import read_experiment
    from knnper.config.yaml_text import parse_yaml
    from simulation.catalogue import experiment_catalogue
    from simulation.sites import over_sites
    from strategies.experiments import without_start

    if not task.is_file() or "model" not in parse_yaml(task.read_text(), str(task)):
        return None
    return without_start(over_sites(read_experiment(task, experiment_catalogue())))


def _asked(
    settings: "ClientSettings", experiment: "Experiment", num_train: int
) -> dict[str, object]:
    """Return the experiment's fingerprint, and what the client's limits say to it."""
    from client.site.limits import Limits
    from knnper.config.document import results_identity

    limits = Limits(settings, experiment, run=0)
    refused, without_training = limits.objections(), limits.without_training(num_train)
    if not without_training:
        refused += limits.objections_to_training(num_train)
    return {
        "experiment": results_identity(experiment),
        "refused": refused,
        "without_training": without_training,
    }


def _show_asked(asked: dict[str, object]) -> None:
    if asked:
        typer.echo(f"fingerprint of the experiment: {asked['experiment']}")
    for reason in cast("list[str]", asked.get("refused", [])):
        say(f"Error: runs of this experiment are refused here: {reason}.")
    if asked.get("without_training"):
        say(f"Warning: {asked['without_training']}.")


def _show(found: "DataCheck", *, with_task: bool) -> None:
    shape = "x".join(map(str, found.input_shape))
    typer.echo(f"inputs: {shape} (height x width x channels) of {found.input_type}")
    _show_counts(found)
    _show_values(found)
    if with_task:
        missing = ", ".join(found.missing_classes) or "none"
        typer.echo(f"classes of the federation without an example here: {missing}")
    typer.echo(f"files that are no images: {found.num_ignored}")
    _list("cannot be read", found.unreadable.values())
    for copies in found.copies:
        _show_copies(copies)
    if not found.copies:
        typer.echo("inputs that occur more than once: 0")
    _show_conflicts(found.conflicts)
    for warning in found.warnings:
        say(f"Warning: {warning}.")
    for problem in found.problems:
        say(f"Error: {problem}.")
    verdict = "cannot be used as it is" if found.problems else "can be used"
    typer.echo(f"This data {verdict}. Nothing was sent anywhere.")


def _show_counts(found: "DataCheck") -> None:
    counts = {split: one.class_counts for split, one in found.splits.items()}
    rows = [
        (name, *(str(of_split[label]) for of_split in counts.values()))
        for label, name in enumerate(found.class_names)
    ]
    totals = ("all", *(str(one.num_examples) for one in found.splits.values()))
    print_table(("class", *counts), [*rows, totals])


def _show_values(found: "DataCheck") -> None:
    for split, one in found.splits.items():
        if one.mean is not None:
            typer.echo(
                f"values of {split}: {one.smallest:g} to {one.largest:g}, "
                f"mean {one.mean:.4g}"
            )


def _show_copies(copies: "Copies") -> None:
    where = f"{copies.copy} like one of {copies.original}"
    if copies.copy == copies.original:
        where = f"{copies.copy} like another one of it"
    pairs = [f"{copy} = {original}" for original, copy in copies.shown]
    _list(f"inputs of {where}", pairs, copies.num_copies)


def _show_conflicts(conflicts: "Conflicts") -> None:
    pairs = [" = ".join(pair) for pair in conflicts.shown]
    _list("inputs with more than one label", pairs, conflicts.num_inputs)


def _list(what: str, lines: "Iterable[str]", count: int | None = None) -> None:
    """Write how many there are, and the first ones."""
    shown = list(lines)
    total = len(shown) if count is None else count
    typer.echo(f"{what}: {total}")
    for line in shown[:_MOST_SHOWN]:
        typer.echo(f"  - {line}")
    if total > _MOST_SHOWN:
        typer.echo(f"  - and {total - _MOST_SHOWN} more")
