"""``knnper store delete``: examples out of a store, with the proof."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.errors import RUN_FAILED, WRONG_USAGE
from knnper.cli.options import AsJson
from knnper.cli.output import print_json, say
from knnper.cli.store.options import StoreFolder, counted, seconds_of
from knnper.cli.store.proving import as_document, proof_lines

if TYPE_CHECKING:
    from datastore.care.erasure import Proof
    from datastore.contents import Ids as StoredIds
    from datastore.examples import Selection, StoreSpec
    from datastore.sqlite.rows import SqliteRows

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
    as_json: AsJson = False,
) -> None:
    """Delete what all options describe, for good, and prove that no byte is left."""
    if not any((ids, external_ids, labels, arrived_from, arrived_before)):
        raise typer.BadParameter(
            "say which: --id, --external-id, --label, --from or --before"
        )
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.examples import Selection
    from datastore.folder import read_identity

    spec = read_identity(folder).spec
    selection = Selection(
        ids=tuple(ids) if ids else None,
        external_ids=tuple(external_ids) if external_ids else None,
        labels=_label_numbers(labels, spec) if labels else None,
        arrived_from=None if arrived_from is None else seconds_of(arrived_from),
        arrived_before=None if arrived_before is None else seconds_of(arrived_before),
    )
    found, document = _found(folder, selection)
    if len(found):
        num_stored = document["num_examples"] + len(found)
        _require_consent(f"{len(found)} of {num_stored} examples of {folder}", yes)
    _delete(folder, found, document, prove=not without_proof, as_json=as_json)


def _found(folder: Path, selection: "Selection") -> tuple["StoredIds", dict[str, Any]]:
    """Return what is described, and say what is not there."""
    from datastore.examples import Selection
    from datastore.folder import open_rows

    with open_rows(folder) as (_, rows):
        if selection.ids is None and selection.external_ids is None:
            # What is damaged says nothing of what must go.
            rows.contents()
        # By their ids, damaged ones can be deleted.
        found, num_stored = rows.select(selection), len(rows.select(Selection()))
        missing = _missing(rows, selection)
    for option, names in missing.items():
        if names:
            say(f"{folder} holds no example --{option} {', '.join(names)}")
    return found, {
        "num_deleted": len(found),
        "num_examples": num_stored - len(found),
        "ids": found.tolist(),
        "missing": missing,
    }


def _delete(
    folder: Path,
    ids: "StoredIds",
    document: dict[str, Any],
    *,
    prove: bool,
    as_json: bool,
) -> None:
    from datastore.care.deletion import delete_examples
    from datastore.care.erasure import Secrets, prove_absence

    names, proof = list[str](), None
    if len(ids):
        secrets = Secrets(_noted(folder, ids, names)) if prove else None
        delete_examples(folder, ids)
        proof = None if secrets is None else prove_absence(folder, secrets)
    if as_json:
        shown = None if proof is None else as_document(proof, names)
        print_json({**document, "proof": shown})
    else:
        _show(folder, len(ids), proof, names)
    if len(ids) == 0:
        say(f"nothing is deleted: {folder} holds no such example")
        raise typer.Exit(RUN_FAILED)
    if proof is not None:
        _require_no_traces(folder, proof)


def _show(
    folder: Path, count: int, proof: "Proof | None", names: Sequence[str]
) -> None:
    if count:
        typer.echo(f"{counted(count, 'example')} deleted")
    if proof is not None:
        for line in proof_lines(proof, folder, "inputs and embeddings", names):
            typer.echo(line)


def _missing(rows: "SqliteRows", selection: "Selection") -> dict[str, list[str]]:
    """Return the ids and external ids, by option, that no example has."""
    from datastore.examples import Selection

    ids, names = selection.ids or (), selection.external_ids or ()
    known_ids = set(rows.select(Selection(ids=ids)).tolist())
    named = rows.select(Selection(external_ids=names))
    known_names = set(rows.external_ids(named))
    return {
        "id": [str(one) for one in ids if one not in known_ids],
        "external-id": [one for one in names if one not in known_names],
    }


def _require_consent(what: str, yes: bool) -> None:
    """Ask; where nobody can be asked, refuse."""
    if yes:
        return
    if not sys.stdin.isatty():
        say(
            f"Error: {what} would be deleted for good; give --yes where nobody can be "
            "asked"
        )
        raise typer.Exit(WRONG_USAGE)
    typer.confirm(f"Delete {what} for good?", abort=True, err=True)


def _noted(folder: Path, ids: "StoredIds", names: list[str]) -> Iterator[bytes]:
    """Yield the bytes that must go, and note what they are of."""
    from datastore.care.erasure import stored_rows

    for name, content in stored_rows(folder, ids):
        names.append(name)
        yield content


def _require_no_traces(folder: Path, proof: "Proof") -> None:
    from datastore.care.verification import is_own
    from datastore.errors import StoreError

    files = sorted({trace.file for trace in proof.traces})
    foreign = [str(file) for file in files if not is_own(folder, file)]
    advice = []
    if foreign:
        advice.append(
            "remove or move elsewhere what is not the store's: " + ", ".join(foreign)
        )
    if len(foreign) < len(files):
        advice.append(
            f"end whoever reads the store, then run: knnper store compact {folder}"
        )
    if advice:
        raise StoreError(
            f"bytes of deleted examples are left in {folder}; {'; '.join(advice)}"
        )


def _label_numbers(labels: Sequence[str], spec: "StoreSpec") -> tuple[int, ...]:
    """Return the labels that are given by name or number."""
    label_of = {name: label for label, name in enumerate(spec.class_names)}
    return tuple(_label_number(text, label_of, spec.num_classes) for text in labels)


def _label_number(text: str, label_of: dict[str, int], num_classes: int) -> int:
    if text in label_of:
        return label_of[text]
    if text.isdecimal() and int(text) < num_classes:
        return int(text)
    names = f" or one of: {', '.join(label_of)}" if label_of else ""
    raise typer.BadParameter(
        f"--label: found {text!r}, expected a number from 0 to {num_classes - 1}{names}"
    )
