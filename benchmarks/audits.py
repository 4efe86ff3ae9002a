"""The audit of a service and of training, by default and with each protection.

Prints the table of docs/privacy.md in Markdown. The service has 400 stored and 400
other digits with noise on their pixels, as in `service_membership`. The training is of
an mlp on digits of 20 clients, long enough to overfit.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measurement import make_parser, say
from benchmarks.service_membership import (
    NUM_STORED,
    SCOPES,
    SITE,
    drawn,
    memory_of,
    named,
    trained,
)
from knnper.client.served_model import open_served
from knnper.client.service.documents import InputPrediction, private_predictions_of
from knnper.client.settings import SitePrivacySettings
from knnper.client.site_privacy import ProtectedUpdates
from knnper.client.site_state import SiteState
from knnper.data.examples import no_examples
from knnper.data.site_data import SiteData
from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.audit.audit import audit_target
from knnper.simulation.audit.canaries import private_answers_game
from knnper.simulation.audit.figures import (
    AttackResult,
    Interval,
    Scores,
    membership_result,
)
from knnper.simulation.audit.one_run import audit_in_one_run
from knnper.simulation.audit.run_target import open_run
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import Workbench, open_workbench

Row = tuple[str, str, AttackResult]  # protection, accuracy in percent, result
NUM_SHADOWS = 4
SITE_NOISE = SitePrivacySettings(clip_norm=1.0, noise_multiplier=8.5, share=("counts",))
NOISE = 80.0  # deviation, of pixels of 0 to 255
ANSWERS_FOR = 1000  # queries that private answers are planned for
EXPERIMENT: Mapping[str, Any] = {
    "name": "audits",
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 20},
    "model": {"name": "mlp", "hidden_sizes": [128]},
    "method": {"name": "knn_per"},
    "run": {"engine": "serial"},
}
TRAINING: Mapping[str, Any] = {
    "num_rounds": 10,
    "batch_size": 8,
    "local_epochs": 5,
    "learning_rate": 0.1,
}
EXAMPLE_PRIVACY: Mapping[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 1.0}
# The noise of ε 8 in 10 rounds, in which every client takes part.
AT_CLIENTS: Mapping[str, Any] = {
    "clip_norm": 1.0,
    "noise_multiplier": 1.15,
    "noise_shares": 20,
}
# Sections of the experiment, and attacks, by protection. The model that secure
# aggregation yields is that of plain training, to quantisation.
RUNS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "none, training": ({}, ("lira", "analytic")),
    "`secure_aggregation`": (
        {"training": {**TRAINING, "secure_aggregation": {"name": "secagg_plus"}}},
        ("analytic",),
    ),
    "`privacy`, ε 8": (
        {"privacy": {"clip_norm": 1.0, "epsilon": 8.0}},
        ("lira", "analytic", "one_run"),
    ),
    "`privacy`, ε 1": (
        {"privacy": {"clip_norm": 1.0, "epsilon": 1.0}},
        ("lira", "one_run"),
    ),
    "`privacy` at clients, ε 8, and `secure_aggregation`": (
        {
            "training": {
                **TRAINING,
                "secure_aggregation": {"name": "secagg_plus", "clip_range": 4.0},
            },
            "privacy": AT_CLIENTS,
            "run": {"max_failed_fraction": 0.0},
        },
        ("lira", "analytic", "one_run"),
    ),
    "`privacy`, correlated, ε 8": (
        {
            "training": {**TRAINING, "participation": 0.5},
            "privacy": {"clip_norm": 1.0, "epsilon": 8.0, "correlated": True},
        },
        ("lira", "one_run"),
    ),
    "`example_privacy`, noise 1": (
        {"training": {**TRAINING, "example_privacy": EXAMPLE_PRIVACY}},
        ("lira", "analytic"),
    ),
}


def service_rows(seed: int) -> Iterator[Row]:
    """Audit a served memory with each scope, and with private answers."""
    key = RandomKey(seed, ("audits",))
    public, stored, others, validation = drawn(key, NOISE)
    model = trained(public, key)
    queries = stored.join(others)
    is_stored = np.arange(len(queries)) < NUM_STORED
    with tempfile.TemporaryDirectory(prefix="knnper-audits-") as folder:
        site_state = SiteState(Path(folder), "site")
        nothing = named(no_examples(SITE.spec), "none")
        data = SiteData(
            named(stored, "stored"), named(validation, "validation"), nothing, SITE
        )
        site_state.install(model, data, took_part=False)

        def accuracy(scores: Mapping[str, Scores]) -> str:
            # The score of a right class is positive.
            return f"{100 * (scores['labels'][~is_stored] > 0).mean():.1f}"

        with closing(open_served(site_state)) as served:
            for scope, (caller, attack) in SCOPES.items():
                memory = memory_of(served, caller, None)
                scores = memory.attack(queries, key)
                attacks = (attack, "waka") if attack == "probabilities" else (attack,)
                for name in attacks:
                    result = membership_result(name, "service", scores[name], is_stored)
                    yield f"none, scope `{scope}`", accuracy(scores), result
        # A twentieth of the public examples is at least as similar.
        directions = torch.nn.functional.normalize(model.embed(public.images))
        threshold = float((directions @ directions.T).quantile(0.95))
        for epsilon in (8.0, 1.0):
            privacy = PrivateAnswerSettings(
                epsilon, threshold=threshold, num_queries=ANSWERS_FOR
            )
            protection = f"`service.privacy`, ε {epsilon:g}"
            with closing(open_served(site_state, privacy)) as served:

                def ask(inputs: Tensor) -> list[InputPrediction]:
                    answer = served.predict_privately(inputs)
                    names = model.class_names
                    return private_predictions_of(answer, names).predictions

                memory = replace(memory, ask=ask, knn_weight=privacy.knn_weight)
                scores = memory.attack(queries, key)
                for name in ("probabilities", "waka"):
                    result = membership_result(name, "service", scores[name], is_stored)
                    yield protection, accuracy(scores), result
            yield protection, "", audit_in_one_run(private_answers_game(privacy), key)


def training_rows(seed: int) -> Iterator[Row]:
    """Audit a run with each protection."""
    for protection, (sections, attacks) in RUNS.items():
        document = {**EXPERIMENT, "training": TRAINING, **sections}
        yield from run_rows(protection, document, attacks, seed)

    def with_site_noise(bench: Workbench) -> Workbench:
        method = ProtectedUpdates(bench.task, bench.method, SITE_NOISE)
        return replace(bench, method=method)

    document = {**EXPERIMENT, "training": TRAINING}
    protection = "`limits.privacy`, ε 8 in 50 rounds"
    attacks = ("lira", "analytic")
    yield from run_rows(protection, document, attacks, seed, with_site_noise)


def run_rows(
    protection: str,
    document: Mapping[str, Any],
    attacks: tuple[str, ...],
    seed: int,
    protect: Callable[[Workbench], Workbench] = lambda bench: bench,
) -> Iterator[Row]:
    """Simulate and audit one experiment."""
    say(f"audits: {protection}")
    run = {"engine": "serial", "seed": seed, "exploding_rounds": 0}
    run |= document.get("run", {})
    experiment = load_experiment({**document, "run": run}, experiment_catalogue())
    with tempfile.TemporaryDirectory(prefix="knnper-audits-") as folder:
        path = Path(folder) / "run"
        bench = protect(open_workbench(experiment))
        results = simulate(
            bench, RunFolder.create(path, experiment), Observer(), ["audits"]
        )
        target = open_run(path, NUM_SHADOWS)
        target = replace(target, ended=replace(target.ended, bench=bench))
        accuracy = f"{100 * results['seen']['accuracy_weighted']:.1f}"
        for result in audit_target(target, attacks, seed).results:
            yield protection, accuracy, result


def table(rows: Iterator[Row]) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield (
        "| protection | accuracy | attack on | AUC | TPR at FPR 0.1 % | at 1 % "
        "| recognisable inputs | ε |"
    )
    yield "|---|--:|---|--:|--:|--:|--:|--:|"
    for protection, accuracy, result in rows:
        bound = ""
        if (epsilon := result.epsilon) is not None:
            bound = f"≥ {epsilon.lower:.2f} (claimed {epsilon.claimed:.3g})"
        figures = result.figures
        cells = [
            protection,
            accuracy,
            f"`{result.attack}`, {result.surface}",
            interval(figures.get("auc"), 1, 3),
            interval(figures.get("tpr_at_fpr_0.1%"), 100, 1),
            interval(figures.get("tpr_at_fpr_1%"), 100, 1),
            interval(figures.get("recognisable"), 100, 1),
            bound,
        ]
        yield f"| {' | '.join(cells)} |"


def interval(figure: Interval | None, scale: float, digits: int) -> str:
    """Return a figure with its interval; empty without one."""
    if figure is None:
        return ""
    value, low, high = (
        f"{scale * number:.{digits}f}"
        for number in (figure.value, figure.low, figure.high)
    )
    return f"{value} ({low} to {high})"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    """Audit and print."""
    seed = parser().parse_args().seed
    for line in table(chain(service_rows(seed), training_rows(seed))):
        print(line, flush=True)


if __name__ == "__main__":
    main()
