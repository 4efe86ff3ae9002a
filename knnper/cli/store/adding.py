"""``knnper store add``: examples into a store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, say
from knnper.cli.store.counting import counter, resumable
from knnper.cli.store.options import ModelRun, StoreFolder, counted

if TYPE_CHECKING:
    from datastore.care.filling import Filled

SourcePath = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of images, SOURCE/CLASS/IMAGE, or a file .npz with the arrays "
        "inputs and labels.",
    ),
]


def add(
    folder: StoreFolder, source: SourcePath, run: ModelRun, as_json: AsJson = False
) -> None:
    """Embed examples and store them; what is stored already is passed over."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.care.filling import fill
    from datastore.care.sources import open_source
    from datastore.folder import open_store, read_identity
    from simulation.trained_model import find_model

    spec = read_identity(folder).spec
    model = find_model(run)
    found = open_source(
        source, model.spec.image_shape, spec.class_names, spec.num_classes
    )
    with (
        open_store(folder, writable=True, fingerprint=model.fingerprint) as opened,
        counter("examples") as progress,
        resumable(progress),
    ):
        filled = fill(
            opened,
            found,
            model.embed,
            model.fingerprint,
            progress.start,
            progress.advance,
        )
        num_examples = len(opened)
    _show(folder, filled, num_examples, as_json)


def _show(folder: Path, filled: "Filled", num_examples: int, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print_json({**asdict(filled), "num_examples": num_examples})
        return
    parts = [
        f"{counted(filled.num_offered, 'example')} offered, {filled.num_stored} of "
        "them stored now"
    ]
    if filled.num_not_kept:
        parts.append(f"{filled.num_not_kept} refused or evicted by the policy")
    if filled.num_evicted:
        parts.append(f"{filled.num_evicted} from before evicted to make room")
    if filled.num_skipped:
        parts.append(f"{filled.num_skipped} passed over, stored already by name")
    if filled.num_ignored:
        parts.append(f"{counted(filled.num_ignored, 'file')} left out, no images")
    say(f"{', '.join(parts)}; {folder} holds {counted(num_examples, 'example')}")
