"""``knnper store advise``: which kind of index suits the client."""

from collections.abc import Callable
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table
from knnper.cli.store.counting import counter
from knnper.cli.store.options import OptionalRun, StoreFolder

if TYPE_CHECKING:
    from torch import Tensor

    from datastore.care.advice import Advice
    from datastore.care.trials import Trial
    from datastore.index.catalogue import IndexSettings


class KernelChoice(StrEnum):
    """How a neighbour counts."""

    PAPER = "paper"
    SQUARED = "squared"


Neighbors = Annotated[int, typer.Option("--num-neighbors", min=1, help="k.")]
Kernel = Annotated[KernelChoice, typer.Option(help="How a neighbour counts.")]
Scale = Annotated[
    float, typer.Option("--kernel-scale", min=1e-12, help="Of the kernel: sigma.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the split.")]


def advise(
    folder: StoreFolder,
    run: OptionalRun = None,
    num_neighbors: Neighbors = 10,
    kernel: Kernel = KernelChoice.PAPER,
    kernel_scale: Scale = 1.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure every kind of index on the store's own examples, and recommend one."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.care.advice import advise as advise_on
    from datastore.care.trials import AdviceSettings
    from datastore.folder import open_rows

    settings = AdviceSettings(num_neighbors, kernel.value, kernel_scale, seed)
    with open_rows(folder) as (identity, rows), counter("kinds") as progress:
        head = None if run is None else _head(run, rows.head().active.fingerprint)
        advice = advise_on(
            rows,
            identity.spec.num_classes,
            settings,
            head,
            progress.start,
            progress.advance,
        )
    if as_json:
        print_json(asdict(advice))
    else:
        _show(folder, advice, num_neighbors)


def _head(run: Path, stored: str) -> "Callable[[Tensor], Tensor]":
    from datastore.store_reader import require_model
    from simulation.trained_model import find_model

    model = find_model(run)
    require_model(stored, model.fingerprint)
    return model.head


def _show(folder: Path, advice: "Advice", num_neighbors: int) -> None:
    if advice.trials:
        print_table(
            (
                "index",
                "accuracy",
                "kNN alone",
                "λ",
                f"recall@{num_neighbors}",
                "bytes each",
                "MB in all",
                "ms a query",
                "s to build",
            ),
            [_row(trial, advice.num_examples) for trial in advice.trials],
        )
        typer.echo(
            f"{advice.num_indexed} examples in the index, {advice.num_asked} others "
            "looked up"
        )
        _show_unlearnt(advice)
    if advice.global_accuracy is not None:
        typer.echo(f"the global model alone: {_percent(advice.global_accuracy)}")
    typer.echo(f"recommended for {folder}: {advice.recommended}: {advice.reason}")
    chosen = {trial.title: trial for trial in advice.trials}.get(advice.recommended)
    if chosen is not None:
        section = as_section(chosen.settings)
        typer.echo(f"knnper store configure {folder} --set 'index={section}'")


def _show_unlearnt(advice: "Advice") -> None:
    titles = [trial.title for trial in advice.trials if not trial.has_learnt]
    if titles:
        typer.echo(
            f"not learnt yet, too few examples: {'; '.join(titles)}. Their vectors are "
            "kept as they are, and so are these figures those of flat"
        )


def as_section(settings: "IndexSettings") -> str:
    """Return settings as YAML on one line, without defaults."""
    defaults = type(settings)()
    changed = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if getattr(settings, field.name) != getattr(defaults, field.name)
    }
    items = {"name": settings.name, **changed}
    return f"{{{', '.join(f'{name}: {value}' for name, value in items.items())}}}"


def _row(trial: "Trial", num_examples: int) -> tuple[str, ...]:
    return (
        trial.title,
        _percent(trial.accuracy),
        _percent(trial.knn_accuracy),
        "" if trial.knn_weight is None else f"{trial.knn_weight:g}",
        f"{trial.recall:.3f}",
        f"{trial.example_bytes:.0f}",
        f"{trial.example_bytes * num_examples / 1e6:.2f}",
        f"{trial.query_ms:.2f}",
        f"{trial.build_s:.2f}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
