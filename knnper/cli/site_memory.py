"""``knnper site onboard`` and ``refresh``: a client's memory of its data."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.formats import counted
from knnper.cli.options import AsJson, ClientFile, Verbose
from knnper.cli.site_service import ClientOverrides, report_changes, serve
from knnper.cli.terminal import CLIENT_APP, print_json, say, tell, tell_list

if TYPE_CHECKING:
    from knnper.client.onboarding import Onboarded
    from knnper.client.state import Accuracy, Serving
    from knnper.strategies.core.exported_model import GlobalModel

ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="An exported model, or the folder of a finished run; works offline.",
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
        help="Whether --model was trained with this site's training examples; they "
        "then give no estimate of the accuracy.",
        show_default="took part, unless the client's file has `train: false`",
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
    True: "assumed to be trained with this site (--took-part): only the validation "
    "split estimates the accuracy",
    False: "assumed to be trained without this site (--new): all of its examples "
    "estimate the accuracy",
}
ForgetVanished = Annotated[
    bool,
    typer.Option(
        "--forget-vanished",
        help="Delete examples that are no longer in the data, without a trace.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show the differences without changing anything."),
]
_CHANGES = {
    "new": "new",
    "changed": "changed, with another input or label",
    "vanished": "in the memory, but no longer in the data",
    "tested": "in the memory, and now in the test split",
}
_KEPT = (
    "Examples that are no longer in the data stay in the memory; to delete them: "
    "knnper site refresh --forget-vanished"
)


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
    """Build a site's memory with a global model, and serve predictions."""
    import knnper.transport  # noqa: F401 (switches off Flower's telemetry and update check)
    from knnper.client.node_log import log_to_stderr
    from knnper.client.onboarding import join
    from knnper.client.onboarding import onboard as onboard_client
    from knnper.client.settings import read_client
    from knnper.process import import_extra
    from knnper.simulation.trained_model import find_model

    if start_service:
        import_extra(
            "prometheus_client", "service", "the service of knnper site onboard"
        )
    settings = read_client(config, overrides or ())
    if model is None and took_part is not None:
        raise typer.BadParameter(
            "--took-part and --new need --model; a server knows it"
        )
    if model is None:
        log_to_stderr(verbose=verbose)
        onboarded = join(settings, patience, app=CLIENT_APP, verbose=verbose)
        global_model = onboarded.site_state.load(onboarded.serving.model)
    else:
        global_model = find_model(model, settings.door)
        onboarded = onboard_client(settings, global_model, took_part=took_part)
    if as_json:
        about = {"client": onboarded.site_state.name, "took_part": onboarded.took_part}
        print_json({**about, **asdict(onboarded.serving)})
    else:
        for line in report(onboarded, global_model):
            tell(line)
    if start_service:
        serve(config, overrides)
        return
    if onboarded.was_served:
        report_changes(settings, config)
    say(f"To serve predictions: knnper site serve {config}")


def refresh(
    config: ClientFile,
    overrides: ClientOverrides = None,
    forget_vanished: ForgetVanished = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Update a client's memory from its data.

    New examples are added and changed examples replaced, under the memory's eviction
    policy; test examples are never stored. Examples that were deleted from the memory
    are not added again. After an interruption, repeat the command. A running service
    continues and uses the updated memory.
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
            tell_list(_CHANGES[kind], names)
    if changes.vanished and not forget_vanished:
        tell(_KEPT)
    if dry_run or not changes:
        return
    tell("The memory is up to date.")
    tell(describe_choice(refreshed.serving))
    tell(describe_gain(refreshed.serving))
    if refreshed.serving.accuracy.num_examples:
        tell(_accuracy(refreshed.serving.accuracy))


def report(onboarded: "Onboarded", model: "GlobalModel") -> Iterator[str]:
    """Yield lines that describe an onboarded client."""
    serving, card = onboarded.serving, model.card
    total = serving.num_train + serving.num_validation + serving.num_test
    splits = (
        f"{serving.num_train} training, {serving.num_validation} validation, "
        f"{serving.num_test} test"
    )
    yield (
        f"{onboarded.site_state.name}: {counted(total, 'example')} ({splits}) of "
        f"{len(card.class_names)} classes"
    )
    rounds = counted(card.num_rounds, "round")
    yield f"model {model.fingerprint[:12]} of {card.name}: {card.method}, {rounds}"
    if onboarded.took_part is not None:
        yield TOOK_PART[onboarded.took_part]
    yield describe_choice(serving)
    yield describe_gain(serving)
    if serving.accuracy.num_examples:
        yield _accuracy(serving.accuracy)
    yield f"stored in {onboarded.site_state.folder.path}"


def describe_choice(serving: "Serving") -> str:
    """Describe λ, k and the class prior, and the data that they were chosen on."""
    tuned_on = serving.tuned_on
    basis = "no example to choose with"
    if tuned_on.num_examples:
        where = EVIDENCE[tuned_on.evidence]
        basis = f"chosen on {counted(tuned_on.num_examples, 'example')}: {where}"
    adapted, prior = "", serving.class_prior
    if prior is not None:
        adapted = (
            ", global model adapted to the site's class prior (β = "
            f"{prior.sharpness:g})"
        )
    return (
        f"λ = {serving.knn_weight:g} (0: the global model alone, 1: the neighbours "
        f"alone), k = {serving.num_neighbors}{adapted}; {basis}"
    )


def describe_gain(serving: "Serving") -> str:
    """Describe the expected gain of the memory over the global model."""
    gain = serving.expected_gain
    if serving.tuned_on.overruled:
        return "falls back to the global model: the neighbours would lower its accuracy"
    if serving.knn_weight == 0 and serving.class_prior is None:
        return "falls back to the global model: the neighbours showed no gain"
    if gain.expected is None or gain.margin is None:
        few = counted(gain.num_examples, "example")
        return f"expected gain over the global model: unknown from {few}"
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
    parts = [
        f"{name} {100 * value:.1f} %" for name, value in named if value is not None
    ]
    return f"accuracy on {where} ({accuracy.num_examples}): {', '.join(parts)}"
