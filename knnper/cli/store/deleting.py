"""``knnper store delete``: examples out of a store, with the proof."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.output import say
from knnper.cli.store.options import StoreFolder, counted, seconds_of
from knnper.cli.store.proving import proof_lines

if TYPE_CHECKING:
    from datastore.care.erasure import Secrets
    from datastore.contents import Ids as StoredIds

Ids = Annotated[
    list[int] | None, typer.Option("--id", help="Of an example; may be repeated.")
]
ExternalIds = Annotated[
    list[str] | None,
    typer.Option(
        "--external-id", help="The owner's name of an example; may be repeated."
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", help="A class, or its number; may be repeated."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="TIME",
        help="Arrived at this time or later, as in 2026-03-31T09:30:00+02:00; UTC "
        "where it says nothing else.",
    ),
]
Before = Annotated[
    str | None,
    typer.Option("--before", metavar="TIME", help="Arrived before this time."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
WithoutProof = Annotated[
    bool, typer.Option("--no-proof", help="Do not look through the files afterwards.")
]


def delete(  # noqa: PLR0913 (one parameter an option)
    folder: StoreFolder,
    ids: Ids = None,
    external_ids: ExternalIds = None,
    labels: Labels = None,
    arrived_from: From = None,
    arrived_before: Before = None,
    yes: Yes = False,
    without_proof: WithoutProof = False,
) -> None:
    """Delete what all options describe, for good, and prove that no byte is left."""
    if not any((ids, external_ids, labels, arrived_from, arrived_before)):
        raise typer.BadParameter(
            "say which: --id, --external-id, --label, --from or --before"
        )
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.care.deletion import delete_examples
    from datastore.care.reading import open_rows
    from datastore.examples import Selection
    from datastore.folder import read_identity

    names = read_identity(folder).spec.class_names
    selection = Selection(
        ids=tuple(ids) if ids else None,
        external_ids=tuple(external_ids) if external_ids else None,
        labels=_label_numbers(labels, names) if labels else None,
        arrived_from=None if arrived_from is None else seconds_of(arrived_from),
        arrived_before=None if arrived_before is None else seconds_of(arrived_before),
    )
    with open_rows(folder) as (_, rows):
        found, num_stored = rows.select(selection), len(rows.contents())
    if len(found) == 0:
        say(f"nothing is deleted: {folder} holds no such example")
        return
    _require_consent(f"{len(found)} of {num_stored} examples of {folder}", yes)
    secrets = None if without_proof else _secrets(folder, found)
    delete_examples(folder, found)
    typer.echo(f"{counted(len(found), 'example')} deleted")
    if secrets is not None:
        _prove(folder, secrets)


def _require_consent(what: str, yes: bool) -> None:
    """Ask; where nobody can be asked, refuse."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"{what} would be deleted for good; give --yes where nobody can be asked"
        )
    typer.confirm(f"Delete {what} for good?", abort=True, err=True)


def _secrets(folder: Path, ids: "StoredIds") -> "Secrets":
    from datastore.care.erasure import Secrets, stored_bytes

    return Secrets(stored_bytes(folder, ids))


def _prove(folder: Path, secrets: "Secrets") -> None:
    from datastore.care.erasure import prove_absence
    from datastore.errors import StoreError

    proof = prove_absence(folder, secrets)
    for line in proof_lines(proof, folder, "inputs and embeddings"):
        typer.echo(line)
    if proof.traces:
        raise StoreError(
            f"bytes of deleted examples are left in {folder}; end whoever reads the "
            f"store, then run: knnper store compact {folder}"
        )


def _label_numbers(labels: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Return the labels that are given by name or number."""
    label_of = {name: label for label, name in enumerate(names)}
    for text in labels:
        if text not in label_of and not text.isdecimal():
            known = ", ".join(names) or "none"
            raise typer.BadParameter(
                f"--label: found {text!r}, expected a number or one of: {known}"
            )
    return tuple(label_of[text] if text in label_of else int(text) for text in labels)
