"""``knnper store add``: examples into a store."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.errors import DataError
from knnper_cli.terminal import (
    RUN_FAILED,
    WRONG_USAGE,
    AsJson,
    Changes,
    ModelRun,
    OptionalRun,
    StoreFolder,
    as_time,
    counted,
    counter,
    megabytes,
    print_json,
    print_table,
    resumable,
    say,
    seconds_of,
)

if TYPE_CHECKING:
    from knnper.datastore.transfer import Filled

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
    from knnper.datastore.store import open_store, read_identity
    from knnper.datastore.transfer import fill, open_source
    from knnper.simulation.trained_model import find_model

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


if TYPE_CHECKING:
    from torch import Tensor

    from knnper.datastore.advice import Advice, Trial
    from knnper.datastore.index_catalogue import IndexSettings


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
    from knnper.datastore.advice import AdviceSettings
    from knnper.datastore.advice import advise as advise_on
    from knnper.datastore.store import open_rows

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
        _advising_show(folder, advice, num_neighbors)


def _head(run: Path, stored: str) -> "Callable[[Tensor], Tensor]":
    from knnper.datastore.store import require_model
    from knnper.simulation.trained_model import find_model

    model = find_model(run)
    require_model(stored, model.fingerprint)
    return model.head


def _advising_show(folder: Path, advice: "Advice", num_neighbors: int) -> None:
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


def compact(folder: StoreFolder) -> None:
    """Write the database anew without gaps, and build and save the index anew."""
    from knnper.datastore.store import open_store

    with open_store(folder, writable=True) as store:
        before = _num_bytes(folder)
        store.compact()
    after = _num_bytes(folder)
    say(f"{folder} took {megabytes(before)} and takes {megabytes(after)}")


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if TYPE_CHECKING:
    from knnper.datastore.transfer import Summary


def info(folder: StoreFolder, as_json: AsJson = False) -> None:
    """Show what a store is, holds and takes."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from knnper.datastore.transfer import summarize

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


Target = Annotated[Path, typer.Argument(metavar="OUT.npz", help="The file to write.")]

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file if it is there.")
]


def export(folder: StoreFolder, target: Target, overwrite: Overwrite = False) -> None:
    """Write all examples with their embeddings to one file."""
    if target.suffix != ".npz":
        raise typer.BadParameter(f"{target}: expected a file that ends in .npz")
    from knnper.datastore.transfer import export_store

    number = export_store(folder, target, overwrite=overwrite)
    say(f"{counted(number, 'example')} of {folder} written to {target}")


if TYPE_CHECKING:
    from knnper.datastore.verify import Proof

SHOWN = 10


def proof_lines(
    proof: "Proof", folder: Path, what: str, names: Sequence[str]
) -> Iterator[str]:
    """Yield in sentences what was found of some ``what`` in ``folder``.

    Parameters
    ----------
    proof
        What was found.
    folder
        Of the store.
    what
        Names the secrets together.
    names
        Names each of them.
    """
    place = (
        f"the {counted(proof.num_files, 'file')} ({megabytes(proof.num_bytes)}) of "
        f"{folder}"
    )
    num_looked_for = proof.num_secrets - len(proof.unprovable)
    if proof.holds and num_looked_for:
        yield (
            f"none of their bytes are in any of {place} ({what} looked for: "
            f"{num_looked_for})"
        )
    yield from _first(
        f"bytes of {names[one.secret]} are in {one.file} at {one.offset}"
        for one in proof.traces
    )
    yield from _first(
        f"{names[secret]} is not absent: it is, in every byte, example {example}"
        for secret, example in sorted(proof.copies.items())
    )
    yield from _first(
        f"{names[secret]}: that it is absent cannot be proven; nothing of it, as of an "
        "image of one colour, can be told apart from what may be stored"
        for secret in proof.unprovable
    )


def as_document(proof: "Proof", names: Sequence[str]) -> dict[str, Any]:
    """Return a proof as plain values; ``names`` name what was looked for."""
    document = asdict(proof)
    document["traces"] = [
        {**asdict(trace), "file": str(trace.file), "secret": names[trace.secret]}
        for trace in proof.traces
    ]
    document["copies"] = {names[one]: at for one, at in proof.copies.items()}
    document["unprovable"] = [names[one] for one in proof.unprovable]
    return {"absent": proof.is_absent, **document}


def _first(lines: Iterable[str]) -> Iterator[str]:
    """Yield the first lines, and how many more there are."""
    found = list(lines)
    yield from found[:SHOWN]
    if len(found) > SHOWN:
        yield f"and {len(found) - SHOWN} more like this"


if TYPE_CHECKING:
    from knnper.datastore.database import SqliteRows
    from knnper.datastore.examples import Ids as StoredIds
    from knnper.datastore.examples import Selection, StoreSpec
    from knnper.datastore.verify import Proof

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
    from knnper.datastore.examples import Selection
    from knnper.datastore.store import read_identity

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
    from knnper.datastore.examples import Selection
    from knnper.datastore.store import open_rows

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
    from knnper.datastore.verify import Secrets, delete_examples, prove_absence

    names, proof = list[str](), None
    if len(ids):
        secrets = Secrets(_noted(folder, ids, names)) if prove else None
        delete_examples(folder, ids)
        proof = None if secrets is None else prove_absence(folder, secrets)
    if as_json:
        shown = None if proof is None else as_document(proof, names)
        print_json({**document, "proof": shown})
    else:
        _deleting_show(folder, len(ids), proof, names)
    if len(ids) == 0:
        say(f"nothing is deleted: {folder} holds no such example")
        raise typer.Exit(RUN_FAILED)
    if proof is not None:
        _require_no_traces(folder, proof)


def _deleting_show(
    folder: Path, count: int, proof: "Proof | None", names: Sequence[str]
) -> None:
    if count:
        typer.echo(f"{counted(count, 'example')} deleted")
    if proof is not None:
        for line in proof_lines(proof, folder, "inputs and embeddings", names):
            typer.echo(line)


def _missing(rows: "SqliteRows", selection: "Selection") -> dict[str, list[str]]:
    """Return the ids and external ids, by option, that no example has."""
    from knnper.datastore.examples import Selection

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
    from knnper.datastore.verify import stored_rows

    for name, content in stored_rows(folder, ids):
        names.append(name)
        yield content


def _require_no_traces(folder: Path, proof: "Proof") -> None:
    from knnper.datastore.examples import StoreError
    from knnper.datastore.verify import is_own

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


if TYPE_CHECKING:
    from knnper.strategies.core.exported_model import GlobalModel

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
    from knnper.datastore.store import open_store

    with open_store(folder, writable=True) as store:
        store.roll_back()
        say(f"{folder} is searched by the model {store.fingerprint[:12]} again")


def _reembed(folder: Path, run: Path) -> None:
    # Everything below loads torch, which `knnper --help` need not wait for.
    from knnper.datastore.store import open_store, read_identity
    from knnper.datastore.transfer import num_to_embed
    from knnper.simulation.trained_model import find_model

    if read_identity(folder).spec.input is None:
        raise DataError(
            f"{folder} keeps no raw inputs, so nothing can be embedded anew; create "
            f"another store, knnper store create NEW_FOLDER --model {run} without "
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
    from knnper.datastore.store import read_identity

    spec = read_identity(folder).spec
    found = (model.spec.image_shape, model.class_names)
    expected = (None if spec.input is None else spec.input.shape, spec.class_names)
    if spec.input is not None and found != expected:
        raise DataError(
            f"the model takes images of shape {found[0]} of the classes "
            f"{', '.join(found[1])}; expected those of {folder}: shape {expected[0]}, "
            f"classes {', '.join(expected[1])}"
        )


if TYPE_CHECKING:
    from knnper.datastore.settings import StoreSettings

SOURCE = "the store's settings"


def store_settings(
    document: Mapping[str, Any], changes: Sequence[str]
) -> "StoreSettings":
    """Return the settings of ``document`` with changes ``KEY=VALUE``.

    A change of ``index.name`` alone replaces the section: parameters of one kind mean
    nothing to another.

    Raises
    ------
    ConfigError
        With all that is wrong.
    """
    from knnper.datastore.settings import StoreSettings
    from knnper.errors import ConfigError
    from knnper.loading import apply_overrides, parse_overrides, parse_settings

    problems: list[Any] = []
    overrides = parse_overrides(changes, problems)
    begun = dict(document)
    if any(one.path == ("index", "name") for one in overrides):
        begun.pop("index", None)
    merged = apply_overrides(begun, overrides, problems)
    settings = parse_settings(StoreSettings, merged, "store", problems)
    if settings is None or problems:
        raise ConfigError(problems, SOURCE)
    return settings


def settings_as_document(settings: "StoreSettings") -> dict[str, Any]:
    """Return settings as plain values."""
    from pydantic_core import to_jsonable_python

    document: dict[str, Any] = to_jsonable_python(settings)
    return document


RequiredChanges = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="As in --set capacity=5000 or --set 'index={name: sq8, rerank: 4}'; may "
        "be repeated.",
    ),
]


def configure(folder: StoreFolder, changes: RequiredChanges) -> None:
    """Change a store's settings; another index is built at once."""
    from knnper.datastore.store import configure_store, open_store, read_identity

    before = read_identity(folder).settings
    settings = store_settings(settings_as_document(before), changes)
    configure_store(folder, settings)
    if settings.index != before.index:
        with open_store(folder, writable=True) as store:
            store.save()
    print_json(settings_as_document(settings))
    say(f"{folder} has these settings from now on")


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

CreatingSeed = Annotated[
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
    seed: CreatingSeed = None,
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
    from knnper.datastore.examples import InputLayout, StoreSpec
    from knnper.datastore.store import create_store
    from knnper.simulation.trained_model import find_model

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


if TYPE_CHECKING:
    from knnper.datastore.salvage import Salvage
    from knnper.datastore.verify import Verdict

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
    from knnper.datastore.verify import verify as verify_store

    verdict = verify_store(folder)
    if as_json:
        print_json({"sound": not verdict.findings, **asdict(verdict)})
    else:
        _verifying_show(folder, verdict)
    if verdict.findings:
        raise typer.Exit(RUN_FAILED)


def salvage(folder: StoreFolder, target: NewFolder, as_json: AsJson = False) -> None:
    """Save what is intact of a damaged store as a new one, and say what is lost."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from knnper.datastore.salvage import salvage as salvage_store

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


def _verifying_show(folder: Path, verdict: "Verdict") -> None:
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
    from knnper.datastore.store import read_identity
    from knnper.datastore.verify import Secrets, prove_absence

    layout = read_identity(folder).spec.input
    if layout is None:
        raise DataError(
            f"{folder} keeps no raw inputs, so none can be compared; delete proves "
            "that embeddings are gone"
        )
    names = list[str]()
    proof = prove_absence(folder, Secrets(_verifying_noted(files, layout.shape, names)))
    if as_json:
        print_json(as_document(proof, names))
    else:
        for line in proof_lines(proof, folder, "inputs", names):
            typer.echo(line)
    if not proof.is_absent:
        raise typer.Exit(RUN_FAILED)


def _verifying_noted(
    files: Sequence[Path], shape: tuple[int, ...], names: list[str]
) -> Iterator[bytes]:
    """Yield the bytes of each input, and note where it is from."""
    from knnper.datastore.transfer import read_inputs

    height, width, channels = shape
    for path in files:
        found = read_inputs(path, (height, width, channels))
        for number, one in enumerate(found):
            names.append(str(path) if len(found) == 1 else f"number {number} of {path}")
            yield one.tobytes()


store = typer.Typer(
    name="store",
    no_args_is_help=True,
    help="Keep, check and change a client's memory on disk.",
)

for _command in (
    create,
    add,
    info,
    verify,
    salvage,
    delete,
    export,
    configure,
    compact,
    reembed,
    advise,
):
    store.command()(_command)
