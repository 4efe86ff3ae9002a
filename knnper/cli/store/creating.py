"""``knnper store create``: an empty store."""

from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from knnper.cli.output import say
from knnper.cli.store.options import Changes, ModelRun, StoreFolder
from knnper.cli.store.settings import store_settings

Policy = Annotated[
    str | None,
    typer.Option(
        help="What stays: concatenate, fixed, fifo, reservoir or class_balanced.",
        show_default="concatenate",
    ),
]
Capacity = Annotated[
    int | None, typer.Option(help="Most examples.", show_default="no bound")
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget-mb", help="Most megabytes (10^6 bytes).", show_default="no bound"
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Of the policy's choices.", show_default="0")
]
Index = Annotated[
    str | None,
    typer.Option(
        help="Kind of index: flat, fp16, sq8, pq, hnsw or ivf.", show_default="flat"
    ),
]
WithoutInputs = Annotated[
    bool,
    typer.Option(
        "--no-inputs",
        help="Keep no raw inputs: another model will need the examples again.",
    ),
]


def create(  # noqa: PLR0913 (one parameter an option)
    folder: StoreFolder,
    run: ModelRun,
    policy: Policy = None,
    capacity: Capacity = None,
    budget_mb: Budget = None,
    seed: Seed = None,
    index: Index = None,
    changes: Changes = None,
    without_inputs: WithoutInputs = False,
) -> None:
    """Create an empty store for what a run's model embeds."""
    given = {
        "policy": policy,
        "capacity": capacity,
        "budget_mb": budget_mb,
        "seed": seed,
        "index.name": index,
    }
    settings = store_settings({}, [*_shorthands(given), *(changes or ())])
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.examples import InputLayout, StoreSpec
    from datastore.folder import create_store
    from simulation.trained_model import find_model

    model = find_model(run)
    layout = (
        None
        if without_inputs
        else InputLayout(model.spec.image_shape, model.spec.stored_dtype)
    )
    spec = StoreSpec(model.spec.num_classes, layout, model.class_names)
    create_store(folder, spec, model.embedding_dim, model.fingerprint, settings).close()
    say(f"{folder} is an empty store for the model {model.fingerprint[:12]} of {run}")


def _shorthands(given: Mapping[str, object]) -> Iterator[str]:
    for name, value in given.items():
        if value is not None:
            yield f"{name}={value}"
