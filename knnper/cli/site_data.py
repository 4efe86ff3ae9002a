"""``knnper site check``: the content of a site's data, and its problems."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.errors import RUN_FAILED
from knnper.cli.formats import counted
from knnper.cli.options import AsJson, ClientFile
from knnper.cli.site_service import ClientOverrides
from knnper.cli.terminal import (
    MOST_LISTED,
    print_json,
    print_table,
    say,
    tell,
    tell_list,
)

if TYPE_CHECKING:
    from knnper.client.privacy_budget import Spending
    from knnper.client.settings import ClientSettings
    from knnper.data.site_check import DataCheck
    from knnper.data.site_data import SiteData
    from knnper.data.site_task import SiteTask
    from knnper.experiment import Experiment
    from knnper.own import Door

TaskFile = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="EXPERIMENT.yaml|MODEL",
        help="The federation's task: the submitted experiment, or the folder of an "
        "exported model.",
    ),
]
Describe = Annotated[
    bool,
    typer.Option(
        "--describe",
        help="Print instead the section `data` of an experiment over sites, derived "
        "from this site's data.",
    ),
]


def check(
    config: ClientFile,
    task: TaskFile = None,
    overrides: ClientOverrides = None,
    describe: Describe = False,
    as_json: AsJson = False,
) -> None:
    """Check a client's data: its content, and whether training can use it.

    With an experiment as the task, also print its fingerprint and whether the client's
    limits and budgets allow it. Nothing leaves this machine. The
    exit code is 1 when training cannot work or is not allowed, or when training and
    test data overlap.
    """
    from knnper.client.settings import read_client
    from knnper.data.site import survey_site
    from knnper.data.site_check import check_site
    from knnper.data.task_file import read_task

    settings = read_client(config, overrides or ())
    agreed = None if task is None else read_task(task)
    data = survey_site(settings.data, settings.base, agreed)
    if describe:
        _describe(data, is_agreed=agreed is not None)
        return
    result = check_site(data)
    experiment = None if task is None else _experiment(task, settings.door)
    limits: dict[str, Any] = {}
    if experiment is not None and agreed is not None:
        num_train = result.splits["train"].num_examples
        limits = _check_limits(settings, experiment, agreed, num_train)
    if as_json:
        about = {"client": settings.name, "sent": False}
        print_json({**about, **result.document(), **limits})
    else:
        tell(f"client: {settings.name}")
        _show(result, with_task=agreed is not None)
        if experiment is not None:
            tell(f"fingerprint of the experiment: {limits['experiment']}")
        for reason in limits.get("refused", []):
            say(f"Error: this client rejects the experiment: {reason}.")
        if limits.get("without_training"):
            say(f"Warning: {limits['without_training']}.")
        for period, spent in limits.get("privacy", {}).items():
            tell(f"epsilon of the {period}: {_spending(spent)}")
    if result.problems or limits.get("refused"):
        raise typer.Exit(RUN_FAILED)


def _describe(data: "SiteData", *, is_agreed: bool) -> None:
    from pydantic_core import to_jsonable_python

    from knnper.data.site import task_with_statistics
    from knnper.data.site_task import SITES, sites_settings
    from knnper.yaml_text import dump_yaml

    if is_agreed:
        raise typer.BadParameter("--describe cannot be combined with --task")
    if data.unreadable:
        reasons = "; ".join(list(data.unreadable.values())[:MOST_LISTED])
        say(f"Warning: {len(data.unreadable)} examples cannot be read: {reasons}")
    settings = to_jsonable_python(sites_settings(task_with_statistics(data)))
    section = {name: value for name, value in settings.items() if value}
    # These have no defaults, although text has neither mean nor deviation.
    section |= {"mean": settings["mean"], "std": settings["std"]}
    tell(dump_yaml({"data": {"name": SITES, **section}}), nl=False)
    say(
        "These are the classes of this site: add those of other sites, in one common "
        "order. Nothing left this machine."
    )


def _experiment(task: Path, door: "Door") -> "Experiment | None":
    """Return the experiment in the form for sites; None if the file holds none."""
    from knnper.experiment_file import read_experiment
    from knnper.simulation.catalogue import experiment_catalogue, over_sites
    from knnper.yaml_text import parse_yaml

    if not task.is_file() or "model" not in parse_yaml(
        task.read_text(encoding="utf-8"), str(task)
    ):
        return None
    # The file is from elsewhere: load only code that the client admits.
    return over_sites(read_experiment(task, experiment_catalogue(lambda _: door)))


def _check_limits(
    settings: "ClientSettings",
    experiment: "Experiment",
    task: "SiteTask",
    num_train: int,
) -> dict[str, Any]:
    """Return the experiment's fingerprint, the client's objections to it, and its ε."""
    from knnper.client.limits import Limits
    from knnper.client.site import require_model
    from knnper.errors import RefusedError

    limits = Limits(settings, experiment, run=0)
    refused, without_training = limits.objections(), limits.without_training(num_train)
    refused += limits.objections_to_plan(num_train)
    try:
        require_model(experiment, task, limits)
    except RefusedError as error:
        refused += error.reasons
    budget = limits.privacy_budget
    spent = {} if budget is None else {"privacy": budget.spending()}
    return {
        "experiment": limits.fingerprint,
        "refused": list(map(str, refused)),
        "without_training": str(without_training or ""),
        **spent,
    }


def _spending(spent: "Spending") -> str:
    """Format the spending of a period."""
    budget = "without a budget" if spent["most"] is None else f"of {spent['most']:.4g}"
    return f"{spent['epsilon']:.4g} spent at delta {spent['delta']:.3g}, {budget}"


def _show(result: "DataCheck", *, with_task: bool) -> None:
    tell(f"inputs: {_form(result)} of {result.input_type}")
    counts = {split: part.class_counts for split, part in result.splits.items()}
    rows = [
        (name, *(str(of_split[label]) for of_split in counts.values()))
        for label, name in enumerate(result.class_names)
    ]
    totals = ("all", *(str(part.num_examples) for part in result.splits.values()))
    print_table(("class", *counts), [*rows, totals])
    for split, part in result.splits.items():
        if part.mean is not None:
            values = f"{part.smallest:g} to {part.largest:g}, mean {part.mean:.4g}"
            tell(f"values of {split}: {values}")
    if with_task:
        missing = ", ".join(result.missing_classes) or "none"
        tell(f"classes of the federation without an example here: {missing}")
    tell(f"files that are no images: {result.num_ignored}")
    tell_list("cannot be read", result.unreadable.values())
    for copies in result.copies:
        pairs = [f"{copy} = {original}" for original, copy in copies.shown]
        is_within = copies.copy == copies.original
        like = "another one of it" if is_within else f"one of {copies.original}"
        tell_list(f"inputs of {copies.copy} like {like}", pairs, copies.num_copies)
    if not result.copies:
        tell("inputs that occur more than once: 0")
    conflicts = [" = ".join(pair) for pair in result.conflicts.shown]
    tell_list("inputs with more than one label", conflicts, result.conflicts.num_inputs)
    for warning in result.warnings:
        say(f"Warning: {warning}.")
    for problem in result.problems:
        say(f"Error: {problem}.")
    verdict = "cannot be used as it is" if result.problems else "can be used"
    tell(f"This data {verdict}. Nothing left this machine.")


def _form(result: "DataCheck") -> str:
    """Format the shape of an input: of an image, or a number of features."""
    height, width, channels = result.input_shape
    if result.input_type == "float32" and (height, width) == (1, 1):
        return counted(channels, "feature")
    return f"{height}x{width}x{channels} (height x width x channels)"
