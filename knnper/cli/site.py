"""The commands of ``knnper site``: its data, its service, its own memory."""

import functools
import logging
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from knnper.cli.terminal import (
    CLIENT_APP,
    RUN_FAILED,
    AsJson,
    ClientFile,
    ErrorReportingGroup,
    Overrides,
    Verbose,
    as_time,
    counted,
    print_json,
    print_table,
    say,
    set_option,
    tell,
)

# What loads torch is imported inside the commands: `knnper --help` need not wait.
if TYPE_CHECKING:
    from collections.abc import Iterable

    from knnper.client.onboarding import Onboarded
    from knnper.client.service.tokens import Tokens
    from knnper.client.settings import ClientSettings
    from knnper.client.state import Accuracy, Serving
    from knnper.data.site_check import DataCheck
    from knnper.data.site_data import SiteData
    from knnper.experiment import Experiment
    from knnper.own import Door
    from knnper.strategies.core.exported_model import GlobalModel

_MOST_SHOWN = 10
ClientOverrides = Annotated[list[str] | None, set_option("service.port=8081")]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="EXPERIMENT.yaml|MODEL",
        help="What the federation agreed on: the experiment that was submitted, or "
        "the folder of an exported model. Without it, the data speaks for itself.",
    ),
]
Describe = Annotated[
    bool,
    typer.Option(
        "--describe",
        help="Write instead the section data of an experiment over sites, as this "
        "site's data suggests it.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the owner's token, which may do everything; by default `token` "
        "in the client's state folder. Made, with a new token, if it is missing. "
        "`knnper site token` makes others."
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token", help="Answer without a token, on a loopback address only."
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="The exported model, or the folder of a finished run; no network is used.",
        show_default="from the federation",
    ),
]
OnboardPatience = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", help="How long to wait for the federation's model."
    ),
]
TookPart = Annotated[
    bool | None,
    typer.Option(
        "--took-part/--new",
        help="Whether --model was trained with this site's training examples, too; "
        "they then say nothing about what to expect.",
        show_default="took part, unless the client's file says `train: false`",
    ),
]
StartService = Annotated[
    bool,
    typer.Option("--serve/--no-serve", help="Whether to serve predictions afterwards."),
]
EVIDENCE = {
    "validation": "the validation split",
    "leave_one_out": "all stored examples, each left out in turn",
}
TOOK_PART = {
    True: "taken as trained with this site, too (--took-part): only the validation "
    "split says what to expect",
    False: "taken as trained without this site (--new): all of its examples say what "
    "to expect",
}
ForgetVanished = Annotated[
    bool,
    typer.Option(
        "--forget-vanished",
        help="Delete, without a trace, examples that are no longer in the data.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Report the differences; change nothing.")
]
_CHANGES = {
    "new": "new",
    "changed": "changed, with another input or label",
    "vanished": "in the memory, and no longer in the data",
    "tested": "in the memory, and in the test split now",
}
_KEPT = (
    "What is no longer in the data stays in the memory; to forget it: knnper site "
    "refresh --forget-vanished"
)
_NICENESS = 10
token = typer.Typer(
    name="token",
    no_args_is_help=True,
    help="Make, list and revoke the tokens of a client's service.",
)
TokenName = Annotated[
    str, typer.Argument(metavar="NAME", help="Of the token, as in ward-3-tablet.")
]
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="SCOPE",
        help="What it may; may be repeated: predict (the default), probabilities, "
        "neighbors, read, add, delete, metrics.",
    ),
]
site = typer.Typer(
    name="site",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="What a site does by itself: look at its data, join, serve, find faults.",
)


def check(
    config: ClientFile,
    task: TaskFile = None,
    overrides: Overrides = None,
    describe: Describe = False,
    as_json: AsJson = False,
) -> None:
    """Say what a client's data holds, and whether it can be learned from.

    With an experiment as the task, also its fingerprint, and whether the client's
    limits allow it. Nothing leaves this machine. The exit code is 1 when training
    cannot work, or when training and test data overlap.
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
    found = check_site(data)
    experiment = None if task is None else _experiment(task, settings.door)
    asked: dict[str, object] = {}
    if experiment is not None:
        num_train = found.splits["train"].num_examples
        asked = _asked(settings, experiment, num_train)
    if as_json:
        about = {"client": settings.name, "sent": False}
        print_json({**about, **found.document(), **asked})
    else:
        tell(f"client: {settings.name}")
        _show(found, with_task=agreed is not None)
        if experiment is not None:
            tell(f"fingerprint of the experiment: {asked['experiment']}")
        for reason in cast("list[str]", asked.get("refused", [])):
            say(f"Error: runs of this experiment are refused here: {reason}.")
        if asked.get("without_training"):
            say(f"Warning: {asked['without_training']}.")
    if found.problems or asked.get("refused"):
        raise typer.Exit(RUN_FAILED)


def _describe(data: "SiteData", *, is_agreed: bool) -> None:
    from pydantic_core import to_jsonable_python

    from knnper.data.site import task_with_statistics
    from knnper.data.site_data import SITES, sites_settings
    from knnper.yaml_text import dump_yaml

    if is_agreed:
        raise typer.BadParameter("--describe is for what nobody agreed on: no --task")
    if data.unreadable:
        reasons = "; ".join(list(data.unreadable.values())[:_MOST_SHOWN])
        say(f"Warning: {len(data.unreadable)} examples cannot be read: {reasons}")
    made = to_jsonable_python(sites_settings(task_with_statistics(data)))
    # Text has neither mean nor deviation, which have no defaults.
    needed = {"mean": made["mean"], "std": made["std"]}
    section = {name: made[name] for name in made if made[name]} | needed
    tell(dump_yaml({"data": {"name": SITES, **section}}), nl=False)
    say(
        "The classes are those of this site: add what others have, in the order that "
        "all of them take. Nothing was sent anywhere."
    )


def _experiment(task: Path, door: "Door") -> "Experiment | None":
    """Return the experiment as the sites see it; None where the file holds none."""
    from knnper.experiment import read_experiment
    from knnper.simulation.catalogue import experiment_catalogue, over_sites
    from knnper.yaml_text import parse_yaml

    if not task.is_file() or "model" not in parse_yaml(
        task.read_text(encoding="utf-8"), str(task)
    ):
        return None
    # It is from elsewhere, and so is what lies beside it.
    return over_sites(read_experiment(task, experiment_catalogue(lambda _: door)))


def _asked(
    settings: "ClientSettings", experiment: "Experiment", num_train: int
) -> dict[str, object]:
    """Return the experiment's fingerprint, and what the client's limits say to it."""
    from knnper.client.limits import Limits

    limits = Limits(settings, experiment, run=0)
    refused, without_training = limits.objections(), limits.without_training(num_train)
    if not without_training:
        refused += limits.objections_to_training(num_train)
    return {
        "experiment": limits.fingerprint,
        "refused": list(map(str, refused)),
        "without_training": str(without_training or ""),
    }


def _show(found: "DataCheck", *, with_task: bool) -> None:
    tell(f"inputs: {_form(found)} of {found.input_type}")
    counts = {split: one.class_counts for split, one in found.splits.items()}
    rows = [
        (name, *(str(of_split[label]) for of_split in counts.values()))
        for label, name in enumerate(found.class_names)
    ]
    totals = ("all", *(str(one.num_examples) for one in found.splits.values()))
    print_table(("class", *counts), [*rows, totals])
    for split, one in found.splits.items():
        if one.mean is not None:
            values = f"{one.smallest:g} to {one.largest:g}, mean {one.mean:.4g}"
            tell(f"values of {split}: {values}")
    if with_task:
        missing = ", ".join(found.missing_classes) or "none"
        tell(f"classes of the federation without an example here: {missing}")
    tell(f"files that are no images: {found.num_ignored}")
    _list("cannot be read", found.unreadable.values())
    for copies in found.copies:
        pairs = [f"{copy} = {original}" for original, copy in copies.shown]
        is_within = copies.copy == copies.original
        like = "another one of it" if is_within else f"one of {copies.original}"
        _list(f"inputs of {copies.copy} like {like}", pairs, copies.num_copies)
    if not found.copies:
        tell("inputs that occur more than once: 0")
    conflicts = [" = ".join(pair) for pair in found.conflicts.shown]
    _list("inputs with more than one label", conflicts, found.conflicts.num_inputs)
    for warning in found.warnings:
        say(f"Warning: {warning}.")
    for problem in found.problems:
        say(f"Error: {problem}.")
    verdict = "cannot be used as it is" if found.problems else "can be used"
    tell(f"This data {verdict}. Nothing was sent anywhere.")


def _form(found: "DataCheck") -> str:
    """Return the shape of an input: that of an image, or a number of features."""
    height, width, channels = found.input_shape
    if found.input_type == "float32" and (height, width) == (1, 1):
        return counted(channels, "feature")
    return f"{height}x{width}x{channels} (height x width x channels)"


def _list(what: str, lines: "Iterable[str]", count: int | None = None) -> None:
    shown = list(lines)
    total = len(shown) if count is None else count
    tell(f"{what}: {total}")
    for line in shown[:_MOST_SHOWN]:
        tell(f"  - {line}")
    if total > _MOST_SHOWN:
        tell(f"  - and {total - _MOST_SHOWN} more")


def doctor(config: ClientFile, as_json: AsJson = False) -> None:
    """Diagnose a client and the connection to its server, and suggest fixes.

    Nothing is changed, and a client that runs is not disturbed. The exit code is 1
    when something is wrong, 2 when the client's file is.
    """
    import knnper.transport  # noqa: F401 (tells Flower to send and look up nothing)
    from knnper.cli.diagnosis import client_verdict, diagnose
    from knnper.client.doctor import client_checks
    from knnper.client.settings import read_client

    settings = read_client(config)
    checks = client_checks(settings)
    diagnose("client", settings.name, config, checks, client_verdict, as_json=as_json)


def serve(
    config: ClientFile,
    overrides: ClientOverrides = None,
    token_file: TokenFile = None,
    no_token: NoToken = False,
) -> None:
    """Serve a client's predictions until SIGTERM or Ctrl-C."""
    from knnper.client.served_model import open_served
    from knnper.client.service.app import make_service
    from knnper.client.service.bodies import Limits
    from knnper.client.service.server import is_loopback
    from knnper.client.service.server import serve as serve_app
    from knnper.client.settings import read_client
    from knnper.client.site_state import SiteState

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = read_client(config, overrides or ())
    site_state = SiteState(settings.state, settings.name, door=settings.door)
    binding = settings.service
    if not is_loopback(binding.host) and binding.tls is None:
        risk = "whoever sees the traffic reads the token and all inputs"
        exposed = (
            f"Warning: {binding.host} is open to other machines, without TLS: {risk}"
        )
        say(f"{exposed}. Set service.tls, or service.host: 127.0.0.1")
    limits = Limits(
        max_request_bytes=binding.max_request_mb * 1_000_000,
        max_pixels=binding.max_megapixels * 1_000_000,
        seconds=binding.max_seconds,
    )
    tokens = _tokens(settings, token_file, no_token)
    opening = functools.partial(open_served, site_state)
    app = make_service(settings.name, opening, tokens=tokens, limits=limits)
    ready = f"{settings.name} serves at"
    # In a process of its own, since all of the data is in memory meanwhile.
    comparing = multiprocessing.get_context("spawn").Process(
        target=_tell_changes_apart, args=(settings, config, os.getpid()), daemon=True
    )
    comparing.start()
    serve_app(app, binding, lambda place: say(f"{ready} {place}"))


def _tokens(
    settings: "ClientSettings", token_file: Path | None, no_token: bool
) -> "Tokens | None":
    from knnper.client.service.server import is_loopback
    from knnper.client.service.tokens import Tokens, read_or_create_owner_token
    from knnper.errors import RunError

    if no_token:
        if not is_loopback(settings.service.host):
            raise RunError(
                f"found --no-token with the address {settings.service.host}, expected "
                "a loopback one: everybody could change the client's memory"
            )
        return None
    path = token_file or settings.state / "token"
    tokens = Tokens(settings.state, read_or_create_owner_token(path))
    say(f"The owner's token is in {path}; for others: knnper site token add")
    return tokens


def onboard(
    config: ClientFile,
    model: ModelFolder = None,
    overrides: ClientOverrides = None,
    start_service: StartService = True,
    patience: OnboardPatience = 600.0,
    took_part: TookPart = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Remember a site's own data by a global model, and serve both."""
    import knnper.transport  # noqa: F401 (tells Flower to send and look up nothing)
    from knnper.client.node_log import log_to_stderr
    from knnper.client.onboarding import join
    from knnper.client.onboarding import onboard as onboard_client
    from knnper.client.settings import read_client
    from knnper.simulation.trained_model import find_model

    settings = read_client(config, overrides or ())
    if model is None and took_part is not None:
        raise typer.BadParameter("it goes with --model; the server knows it by itself")
    if model is None:
        log_to_stderr(verbose=verbose)
        onboarded = join(settings, patience, app=CLIENT_APP, verbose=verbose)
        found = onboarded.site_state.load(onboarded.serving.model)
    else:
        found = find_model(model, settings.door)
        onboarded = onboard_client(settings, found, took_part=took_part)
    if as_json:
        about = {"client": onboarded.site_state.name, "took_part": onboarded.took_part}
        print_json({**about, **asdict(onboarded.serving)})
    else:
        for line in report(onboarded, found):
            tell(line)
    if start_service:
        serve(config, overrides)
        return
    if onboarded.was_served:
        tell_changes(settings, config)
    say(f"To serve it: knnper site serve {config}")


def refresh(
    config: ClientFile,
    overrides: ClientOverrides = None,
    forget_vanished: ForgetVanished = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Bring a client's memory up to date with its data.

    New examples are added and changed ones replaced, as the memory's eviction policy
    says; those of the test split are never remembered. Examples that were deleted from
    the memory stay away. Interrupted, the command can be repeated; a service that runs
    goes on, and takes the outcome up.
    """
    from knnper.client.onboarding import refresh as refresh_client
    from knnper.client.settings import read_client

    refreshed = refresh_client(
        read_client(config, overrides or ()),
        forget_vanished=forget_vanished,
        only_look=dry_run,
    )
    changes = refreshed.changes
    if as_json:
        about = {
            "client": refreshed.site_state.name,
            "changed": bool(changes) and not dry_run,
        }
        outcome = {"changes": asdict(changes), "serving": asdict(refreshed.serving)}
        print_json({**about, **outcome})
        return
    tell(f"differences between data and memory: {changes}")
    for kind, names in asdict(changes).items():
        if names:
            _list(_CHANGES[kind], names)
    if changes.vanished and not forget_vanished:
        tell(_KEPT)
    if dry_run or not changes:
        return
    tell("The memory has been brought up to date.")
    tell(describe_choice(refreshed.serving))
    tell(describe_gain(refreshed.serving))
    if refreshed.serving.accuracy.num_examples:
        tell(_accuracy(refreshed.serving.accuracy))


def tell_changes(settings: "ClientSettings", config: Path) -> None:
    """Say how a client's data differs from its memory, if it does."""
    from knnper.client.onboarding import read_changes
    from knnper.client.site_state import SiteState
    from knnper.errors import KnnPerError

    try:
        site_state = SiteState(settings.state, settings.name, door=settings.door)
        compared = read_changes(settings, site_state)
    except (KnnPerError, OSError) as error:
        say(f"The data cannot be compared with the memory: {error}")
        return
    if compared is not None and compared.changes:
        say(
            f"The data has changed since the memory was made of it: {compared.changes}."
            f" To bring the memory up to date: knnper site refresh {config}"
        )


def _tell_changes_apart(settings: "ClientSettings", config: Path, parent: int) -> None:
    from knnper.lifeline import die_with_parent

    die_with_parent(parent)
    os.nice(_NICENESS)
    logging.getLogger().setLevel(logging.WARNING)
    tell_changes(settings, config)


def report(onboarded: "Onboarded", model: "GlobalModel") -> Iterator[str]:
    """Yield what a person wants to know of a client that was onboarded."""
    serving, card = onboarded.serving, model.card
    sizes = serving.num_train, serving.num_validation, serving.num_test
    splits = "{} training, {} validation, {} test".format(*sizes)
    held = f"{counted(sum(sizes), 'example')} ({splits})"
    yield f"{onboarded.site_state.name}: {held} of {len(card.class_names)} classes"
    rounds = counted(card.num_rounds, "round")
    yield f"model {model.fingerprint[:12]} of {card.name}: {card.method}, {rounds}"
    if onboarded.took_part is not None:
        yield TOOK_PART[onboarded.took_part]
    yield describe_choice(serving)
    yield describe_gain(serving)
    if serving.accuracy.num_examples:
        yield _accuracy(serving.accuracy)
    yield f"kept in {onboarded.site_state.folder.path}"


def describe_choice(serving: "Serving") -> str:
    """Return λ, k and the class prior, and on what they were chosen."""
    tuned_on = serving.tuned_on
    how = "no example to choose on"
    if tuned_on.num_examples:
        where = EVIDENCE[tuned_on.evidence]
        how = f"chosen on {counted(tuned_on.num_examples, 'example')}: {where}"
    adapted, prior = "", serving.class_prior
    if prior is not None:
        adapted = (
            ", the global model adapted to the site's own shares of the classes (class "
            f"prior, β = {prior.sharpness:g})"
        )
    return (
        f"λ = {serving.knn_weight:g} (0: the global model alone, 1: the neighbours "
        f"alone), k = {serving.num_neighbors}{adapted}; {how}"
    )


def describe_gain(serving: "Serving") -> str:
    """Return what the memory is expected to add, or that nothing is known of it."""
    gain = serving.expected_gain
    if serving.tuned_on.overruled:
        return "falls back to the global model: the neighbours would make it worse"
    if serving.knn_weight == 0 and serving.class_prior is None:
        return "falls back to the global model: the neighbours showed no gain over it"
    if gain.expected is None or gain.margin is None:
        few = counted(gain.num_examples, "example")
        return f"expected gain over the global model: cannot be known from {few}"
    measured_on = counted(gain.num_examples, "example")
    return (
        f"expected gain over the global model: {100 * gain.expected:+.1f} points, "
        f"± {100 * gain.margin:.1f} (95 %), on {measured_on}, each predicted from the "
        "others (cross-validation)"
    )


def _accuracy(accuracy: "Accuracy") -> str:
    where = {"test": "the test split", **EVIDENCE}[accuracy.measured_on or "test"]
    figures = accuracy.global_model, accuracy.knn, accuracy.mixed
    named = zip(("global model", "neighbours", "both"), figures, strict=True)
    parts = [f"{name} {100 * one:.1f} %" for name, one in named if one is not None]
    return f"accuracy on {where} ({accuracy.num_examples}): {', '.join(parts)}"


@token.command()
def add(config: ClientFile, name: TokenName, scopes: Scopes = None) -> None:
    """Make a token and write it to standard output; it is never shown again."""
    from knnper.client.service.tokens import SCOPES, add_token
    from knnper.settings import alternatives

    wanted = scopes or ["predict"]
    for scope in wanted:
        if scope not in SCOPES:
            raise typer.BadParameter(
                f"--scope: found {scope!r}, {alternatives(scope, SCOPES)}"
            )
    known = [scope for scope in SCOPES if scope in wanted]
    secret = add_token(_claimed_state(config), name, known)
    say(f"The token {name} may: {'; '.join(SCOPES[scope] for scope in known)}")
    tell(secret)


@token.command("list")
def list_tokens(config: ClientFile, as_json: AsJson = False) -> None:
    """Show the tokens by name; the owner's, which may do everything, is not listed."""
    from knnper.client.service.tokens import read_tokens
    from knnper.client.settings import read_client

    rows = [
        (one.name, ", ".join(one.scopes), as_time(one.made)[:10])
        for one in read_tokens(read_client(config).state)
    ]
    header = ("name", "scopes", "made")
    if as_json:
        print_json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        print_table(header, rows)


@token.command()
def revoke(config: ClientFile, name: TokenName) -> None:
    """Forget a token; a service that runs refuses it from then on."""
    from knnper.client.service.tokens import revoke_token

    revoke_token(_claimed_state(config), name)
    say(f"The token {name} is revoked")


def _claimed_state(config: Path) -> Path:
    from knnper.client.settings import read_client
    from knnper.client.state import StateFolder, claim

    settings = read_client(config)
    claim(StateFolder(settings.state), settings.name, None)
    return settings.state


for _command in (check, onboard, refresh, serve, doctor):
    site.command()(_command)


site.add_typer(token)
