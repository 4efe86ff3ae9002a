"""``knnper onboard``: from "I have data" to "I serve personalised predictions"."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.client import Verbose
from knnper.cli.options import AsJson
from knnper.cli.output import print_json, say, tell
from knnper.cli.serve import ClientFile, Overrides, serve
from knnper.cli.store.options import counted

if TYPE_CHECKING:
    from client.onboarding import Onboarded
    from client.residence.serving import Accuracy, Serving
    from client.settings import ClientSettings
    from knnper.transport.model_folder.global_model import GlobalModel

ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="The exported model, or the folder of a finished run; no network is used.",
        show_default="from the federation",
    ),
]
Patience = Annotated[
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


def onboard(  # noqa: PLR0913 (one parameter an option)
    config: ClientFile,
    model: ModelFolder = None,
    overrides: Overrides = None,
    start_service: StartService = True,
    patience: Patience = 600.0,
    took_part: TookPart = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Remember a site's own data by a global model, and serve both."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    import knnper.transport  # noqa: F401 (tells Flower to send and look up nothing)
    from client.settings import read_client

    settings = read_client(config, overrides or ())
    if model is None and took_part is not None:
        raise typer.BadParameter("it goes with --model; the server knows it by itself")
    if model is None:
        onboarded, found = _over_network(settings, patience, verbose)
    else:
        onboarded, found = _by_folder(settings, model, took_part)
    if as_json:
        _print(onboarded)
    else:
        for line in report(onboarded, found):
            tell(line)
    if start_service:
        serve(config, overrides)
    else:
        say(f"To serve it: knnper serve --config {config}")


def _by_folder(
    settings: "ClientSettings", folder: Path, took_part: bool | None
) -> "tuple[Onboarded, GlobalModel]":
    from client.onboarding import onboard as onboard_client
    from simulation.trained_model import find_model

    model = find_model(folder)
    return onboard_client(settings, model, took_part=took_part), model


def _over_network(
    settings: "ClientSettings", patience: float, verbose: bool
) -> "tuple[Onboarded, GlobalModel]":
    from client.joining import join

    onboarded = join(settings, patience, verbose=verbose)
    return onboarded, onboarded.residence.load(onboarded.serving.model)


def report(onboarded: "Onboarded", model: "GlobalModel") -> Iterator[str]:
    """Yield what a person wants to know of a client that was onboarded."""
    serving, card = onboarded.serving, model.card
    num_all = serving.num_train + serving.num_validation + serving.num_test
    yield (
        f"{onboarded.residence.name}: {counted(num_all, 'example')} "
        f"({serving.num_train} training, {serving.num_validation} validation, "
        f"{serving.num_test} test) of {len(card.class_names)} classes"
    )
    yield (
        f"model {model.fingerprint[:12]} of {card.name}: {card.method}, "
        f"{counted(card.num_rounds, 'round')}"
    )
    if onboarded.took_part is not None:
        yield TOOK_PART[onboarded.took_part]
    yield describe_choice(serving)
    yield describe_gain(serving)
    if serving.accuracy.num_examples:
        yield _accuracy(serving.accuracy)
    yield f"kept in {onboarded.residence.places.folder}"


def describe_choice(serving: "Serving") -> str:
    """Return λ, k and the class prior, and on what they were chosen."""
    tuned_on = serving.tuned_on
    how = "no example to choose on"
    if tuned_on.num_examples:
        where = EVIDENCE[tuned_on.evidence]
        how = f"chosen on {counted(tuned_on.num_examples, 'example')}: {where}"
    return (
        f"λ = {serving.knn_weight:g} (0: the global model alone, 1: the neighbours "
        f"alone), k = {serving.num_neighbors}{_adapted(serving)}; {how}"
    )


def _adapted(serving: "Serving") -> str:
    prior = serving.class_prior
    if prior is None:
        return ""
    return (
        f", the global model adapted to the site's own shares of the classes (class "
        f"prior, β = {prior.sharpness:g})"
    )


def describe_gain(serving: "Serving") -> str:
    """Return what the memory is expected to add, or that nothing is known of it."""
    gain = serving.expected_gain
    if serving.tuned_on.overruled:
        return "falls back to the global model: the neighbours would make it worse"
    if serving.knn_weight == 0 and serving.class_prior is None:
        return "falls back to the global model: the neighbours showed no gain over it"
    if gain.expected is None or gain.margin is None:
        return (
            f"expected gain over the global model: cannot be known from "
            f"{counted(gain.num_examples, 'example')}"
        )
    measured_on = counted(gain.num_examples, "example")
    return (
        f"expected gain over the global model: {100 * gain.expected:+.1f} points, "
        f"± {100 * gain.margin:.1f} (95 %), on {measured_on}, each predicted from the "
        "others (cross-validation)"
    )


def _accuracy(accuracy: "Accuracy") -> str:
    where = {"test": "the test split", **EVIDENCE}[accuracy.measured_on or "test"]
    figures = (
        ("global model", accuracy.global_model),
        ("neighbours", accuracy.knn),
        ("both", accuracy.mixed),
    )
    parts = [
        f"{name} {100 * value:.1f} %" for name, value in figures if value is not None
    ]
    return f"accuracy on {where} ({accuracy.num_examples}): {', '.join(parts)}"


def _print(onboarded: "Onboarded") -> None:
    from dataclasses import asdict

    about = {"client": onboarded.residence.name, "took_part": onboarded.took_part}
    print_json({**about, **asdict(onboarded.serving)})
