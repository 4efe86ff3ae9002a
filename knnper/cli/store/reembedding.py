"""``knnper store reembed``: a store for another global model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.output import say
from knnper.cli.store.counting import counter, resumable
from knnper.cli.store.options import OptionalRun, StoreFolder
from knnper.config.errors import DataError

if TYPE_CHECKING:
    from knnper.transport.model_folder.global_model import GlobalModel

RollBack = Annotated[
    bool,
    typer.Option(
        "--roll-back", help="Search the embeddings from before the last time again."
    ),
]


def reembed(
    folder: StoreFolder, run: OptionalRun = None, roll_back: RollBack = False
) -> None:
    """Embed all raw inputs by another run's model, then search those embeddings."""
    if (run is not None) == roll_back:
        raise typer.BadParameter("give either --run RUN or --roll-back")
    if run is None:
        _roll_back(folder)
    else:
        _reembed(folder, run)


def _roll_back(folder: Path) -> None:
    from datastore.folder import open_store

    with open_store(folder, writable=True) as store:
        store.roll_back()
        say(f"{folder} is searched by the model {store.fingerprint[:12]} again")


def _reembed(folder: Path, run: Path) -> None:
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.care.summary import num_to_embed
    from datastore.folder import open_store, read_identity
    from simulation.trained_model import find_model

    if read_identity(folder).spec.input is None:
        raise DataError(
            f"{folder} keeps no raw inputs, so nothing can be embedded anew; create "
            f"another store, knnper store create NEW_FOLDER --run {run} without "
            "--no-inputs, and add the examples to it"
        )
    model = find_model(run)
    with open_store(folder, writable=True) as store:
        _require_same_task(folder, model)
        if store.fingerprint == model.fingerprint:
            say(f"{folder} is embedded by the model of {run} already")
            return
        with counter("examples") as progress, resumable(progress):
            progress.start(num_to_embed(folder, model.fingerprint))
            store.reembed(model.embed, model.fingerprint, progress.advance)
        say(
            f"{len(store)} examples of {folder} are embedded by the model "
            f"{model.fingerprint[:12]} of {run}; to go back: knnper store reembed "
            f"{folder} --roll-back"
        )


def _require_same_task(folder: Path, model: "GlobalModel") -> None:
    from datastore.folder import read_identity

    spec = read_identity(folder).spec
    found = (model.spec.image_shape, model.class_names)
    expected = (None if spec.input is None else spec.input.shape, spec.class_names)
    if spec.input is not None and found != expected:
        raise DataError(
            f"the model takes images of shape {found[0]} of the classes "
            f"{', '.join(found[1])}; expected those of {folder}: shape {expected[0]}, "
            f"classes {', '.join(expected[1])}"
        )
