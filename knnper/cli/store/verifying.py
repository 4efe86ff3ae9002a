"""``knnper store verify``: whether a store is sound, and whether bytes are gone.

And ``knnper store salvage``, for one that is not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.errors import RUN_FAILED
from knnper.cli.options import AsJson
from knnper.cli.output import print_json
from knnper.cli.store.options import StoreFolder, counted
from knnper.cli.store.proving import as_document, proof_lines
from knnper.config.errors import DataError

if TYPE_CHECKING:
    from datastore.care.salvage import Salvage
    from datastore.care.verification import Verdict

NewFolder = Annotated[
    Path, typer.Argument(metavar="NEW_FOLDER", help="Of the new store; must be empty.")
]

AbsentFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--absent",
        metavar="FILE",
        help="Prove that the bytes of these raw inputs (an image, .npy, or .npz with "
        "inputs) are in no file of the store, instead; may be repeated.",
    ),
]


def verify(
    folder: StoreFolder, absent: AbsentFiles = None, as_json: AsJson = False
) -> None:
    """Check all that was written, and the files; exit with 1 if anything is wrong."""
    if absent:
        _verify_absence(folder, absent, as_json)
        return
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.care.verification import verify as verify_store

    verdict = verify_store(folder)
    if as_json:
        print_json({"sound": not verdict.findings, **asdict(verdict)})
    else:
        _show(folder, verdict)
    if verdict.findings:
        raise typer.Exit(RUN_FAILED)


def salvage(folder: StoreFolder, target: NewFolder, as_json: AsJson = False) -> None:
    """Save what is intact of a damaged store as a new one, and say what is lost."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.care.salvage import salvage as salvage_store

    saved = salvage_store(folder, target)
    if as_json:
        print_json(asdict(saved))
        return
    typer.echo(f"{target} holds what is intact of {folder}:")
    for line in salvage_lines(saved):
        typer.echo(f"  {line}")


def salvage_lines(found: "Salvage") -> Iterator[str]:
    """Yield in sentences what is saved, and what is lost."""
    yield f"{counted(found.num_saved, 'example')}, intact in every byte"
    if found.lost:
        ids = ", ".join(map(str, found.lost))
        yield f"not {counted(len(found.lost), 'example')} that are damaged: {ids}"
    if found.num_missing:
        missing = counted(found.num_missing, "example")
        yield f"not {missing} of which nothing is left"
    if found.num_changes_missing:
        yield (
            f"not the last {counted(found.num_changes_missing, 'change')}, of which "
            "nothing is left; examples that they evicted are there again"
        )


def _show(folder: Path, verdict: "Verdict") -> None:
    if not verdict.findings:
        typer.echo(
            f"{folder} is sound: {counted(verdict.num_examples, 'example')}, "
            f"{counted(verdict.num_rows, 'input')} and embeddings as they were written"
        )
        return
    typer.echo(f"{folder}: {counted(len(verdict.findings), 'finding')}")
    for finding in verdict.findings:
        typer.echo(f"  - {finding.what}\n    to mend it: {finding.mend}")
    if verdict.saving is not None:
        typer.echo(f"knnper store salvage {folder} NEW_FOLDER would save:")
        for line in salvage_lines(verdict.saving):
            typer.echo(f"  {line}")


def _verify_absence(folder: Path, files: Sequence[Path], as_json: bool) -> None:
    from datastore.care.erasure import Secrets, prove_absence
    from datastore.folder import read_identity

    layout = read_identity(folder).spec.input
    if layout is None:
        raise DataError(
            f"{folder} keeps no raw inputs, so none can be compared; delete proves "
            "that embeddings are gone"
        )
    names = list[str]()
    proof = prove_absence(folder, Secrets(_noted(files, layout.shape, names)))
    if as_json:
        print_json(as_document(proof, names))
    else:
        for line in proof_lines(proof, folder, "inputs", names):
            typer.echo(line)
    if not proof.is_absent:
        raise typer.Exit(RUN_FAILED)


def _noted(
    files: Sequence[Path], shape: tuple[int, ...], names: list[str]
) -> Iterator[bytes]:
    """Yield the bytes of each input, and note where it is from."""
    from datastore.care.sources import read_inputs

    height, width, channels = shape
    for path in files:
        found = read_inputs(path, (height, width, channels))
        for number, one in enumerate(found):
            names.append(str(path) if len(found) == 1 else f"number {number} of {path}")
            yield one.tobytes()
