"""``knnper store info``: what a store is."""

from typing import TYPE_CHECKING, Any

import typer

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table
from knnper.cli.store.options import StoreFolder, as_time, megabytes

if TYPE_CHECKING:
    from datastore.care.summary import Summary


def info(folder: StoreFolder, as_json: AsJson = False) -> None:
    """Show what a store is, holds and takes."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from datastore.care.summary import summarize

    summary = summarize(folder)
    if as_json:
        print_json(_document(summary))
        return
    for name, value in _lines(summary):
        typer.echo(f"{name}: {value}")
    print_table(("class", "examples"), _classes(summary))


def _document(summary: "Summary") -> dict[str, Any]:
    from pydantic_core import to_jsonable_python

    document: dict[str, Any] = to_jsonable_python(summary)
    left = _room(summary)
    return {**document, "num_examples": summary.num_examples, "num_free": left}


def _lines(summary: "Summary") -> list[tuple[str, str]]:
    settings, spec = summary.settings, summary.identity.spec
    inputs = "none are kept"
    if spec.input is not None:
        inputs = f"{spec.input.dtype} of shape {spec.input.shape}"
    budget = settings.budget_mb
    ends = summary.arrivals or ()
    return [
        ("store", summary.identity.store_id),
        ("created", as_time(summary.identity.created)),
        ("examples", str(summary.num_examples)),
        ("arrived", " to ".join(map(as_time, ends)) or "nothing has"),
        ("inputs", inputs),
        ("policy", settings.policy),
        ("capacity", _capacity(summary)),
        ("budget", "not bounded" if budget is None else f"{budget:g} MB"),
        *_versions(summary),
        ("index", f"{settings.index.name}, {_saved(summary)}"),
        ("files", f"{len(summary.files)}, {megabytes(sum(summary.files.values()))}"),
        *((f"  {name}", megabytes(size)) for name, size in summary.files.items()),
        ("erasure pending", "yes" if summary.is_erasing else "no"),
        ("writer", summary.writer or "none"),
    ]


def _capacity(summary: "Summary") -> str:
    if summary.capacity is None:
        return "not bounded"
    return f"{summary.capacity} examples, room for {_room(summary)} more"


def _room(summary: "Summary") -> int | None:
    if summary.capacity is None:
        return None
    return max(0, summary.capacity - summary.num_examples)


def _versions(summary: "Summary") -> list[tuple[str, str]]:
    roles = {summary.active: "searched", summary.previous: "can be rolled back to"}
    return [
        (
            f"model {version.fingerprint[:12]}",
            f"{version.embedding_dim} numbers an embedding, "
            f"{roles.get(version.number, 'being embedded')}",
        )
        for version in summary.versions
    ]


def _saved(summary: "Summary") -> str:
    return (
        f"{megabytes(summary.index_bytes)} saved"
        if summary.index_bytes
        else "not saved"
    )


def _classes(summary: "Summary") -> list[tuple[str, str]]:
    names = summary.identity.spec.class_names
    return [
        (names[label] if names else str(label), str(count))
        for label, count in enumerate(summary.num_by_label)
    ]
