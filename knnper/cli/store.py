"""``knnper store``: a client's memory on disk."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_jsonable_python

from knnper.cli.counters import counter
from knnper.cli.errors import RUN_FAILED, WRONG_USAGE
from knnper.cli.formats import as_time, counted, megabytes, parse_time
from knnper.cli.options import AsJson, set_option
from knnper.cli.terminal import print_json, print_table, say, tell
from knnper.errors import DataError

# Modules that load torch are imported inside the commands, so that `knnper --help` is
# fast.
if TYPE_CHECKING:
    from knnper.datastore.examples import Ids as StoredIds
    from knnper.datastore.examples import Selection, StoreSpec
    from knnper.datastore.policy import StoreSettings
    from knnper.datastore.transfer import StoreSummary
    from knnper.datastore.verify import Salvage

StoreFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The store's folder.")
]
_EMBEDDING_MODEL = typer.Option(
    "--model",
    metavar="FOLDER",
    help="The exported model, or the folder of a finished run, that embeds.",
)
ModelRun = Annotated[Path, _EMBEDDING_MODEL]
OptionalRun = Annotated[Path | None, _EMBEDDING_MODEL]
Changes = Annotated[
    list[str] | None, set_option("'index={name: factory, factory: SQ8, rerank: 4}'")
]

store = typer.Typer(
    name="store",
    no_args_is_help=True,
    help="Keep, check and change a client's memory on disk.",
)


def store_settings(
    document: Mapping[str, Any], changes: Sequence[str]
) -> "StoreSettings":
    """Apply the changes ``KEY=VALUE`` to settings, and validate them.

    A change of ``index.name`` replaces the whole section, because kinds of index have
    different parameters.
    """
    from knnper.datastore.policy import StoreSettings
    from knnper.errors import ConfigError
    from knnper.settings import apply_overrides, parse_overrides, parse_settings

    problems: list[Any] = []
    overrides = parse_overrides(changes, problems)
    base = dict(document)
    if any(override.path == ("index", "name") for override in overrides):
        base.pop("index", None)
    merged = apply_overrides(base, overrides, problems)
    settings = parse_settings(StoreSettings, merged, "store", problems)
    if settings is None or problems:
        raise ConfigError(problems, "the store's settings")
    return settings


@store.command()
def create(
    folder: StoreFolder,
    run: ModelRun,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Eviction: concatenate, fixed, fifo, reservoir or class_balanced.",
            show_default="concatenate",
        ),
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(help="Most examples.", show_default="no bound")
    ] = None,
    budget_mb: Annotated[
        float | None,
        typer.Option(
            "--budget-mb", help="Most megabytes (10^6 bytes).", show_default="no bound"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the policy's random choices.", show_default="0"),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            metavar="flat|FACTORY",
            help="Exact search, or a string of faiss.index_factory such as HNSW16.",
            show_default="flat",
        ),
    ] = None,
    changes: Changes = None,
    without_inputs: Annotated[
        bool,
        typer.Option(
            "--no-inputs",
            help="Keep no raw inputs; the store then cannot be re-embedded.",
        ),
    ] = False,
) -> None:
    """Create an empty store for embeddings by a run's model."""
    options = {
        "policy": policy,
        "capacity": capacity,
        "budget_mb": budget_mb,
        "seed": seed,
        "index.name": index if index in (None, "flat") else "factory",
        "index.factory": None if index == "flat" else index,
    }
    shorthands = [
        f"{name}={value}" for name, value in options.items() if value is not None
    ]
    settings = store_settings({}, [*shorthands, *(changes or ())])
    from knnper.datastore.examples import InputLayout, StoreSpec
    from knnper.datastore.store import create_store
    from knnper.simulation.trained_model import find_model

    model = find_model(run)
    layout = InputLayout(model.spec.image_shape, model.spec.stored_dtype)
    spec = StoreSpec(
        num_classes=model.spec.num_classes,
        input=None if without_inputs else layout,
        class_names=model.class_names,
    )
    create_store(folder, spec, model.embedding_dim, model.fingerprint, settings).close()
    say(f"{folder} is an empty store for the model {model.fingerprint[:12]} of {run}")


@store.command()
def add(
    folder: StoreFolder,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of images, SOURCE/CLASS/IMAGE, or a file .npz with the "
            "arrays inputs and labels.",
        ),
    ],
    run: ModelRun,
    as_json: AsJson = False,
) -> None:
    """Embed and store examples; skip those that are stored already."""
    from knnper.datastore.store import open_store, read_identity
    from knnper.datastore.transfer import fill, open_source
    from knnper.simulation.trained_model import find_model

    spec = read_identity(folder).spec
    model = find_model(run)
    examples = open_source(
        source, model.spec.image_shape, spec.class_names, spec.num_classes
    )
    with (
        open_store(folder, writable=True, fingerprint=model.fingerprint) as opened,
        counter("examples", is_kept=True) as progress,
    ):
        filled = fill(
            opened,
            examples,
            embed=model.embed,
            fingerprint=model.fingerprint,
            on_start=progress.start,
            on_progress=progress.advance,
        )
        num_examples = len(opened)
    if as_json:
        print_json({**asdict(filled), "num_examples": num_examples})
        return
    counts = {
        "offered": filled.num_offered,
        "stored now": filled.num_stored,
        "rejected or evicted by the policy": filled.num_not_kept,
        "older examples evicted to make room": filled.num_evicted,
        "skipped, stored already by name": filled.num_skipped,
        "left out, no images": filled.num_ignored,
    }
    outcome = ", ".join(f"{count} {label}" for label, count in counts.items() if count)
    say(f"{outcome}; {folder} holds {counted(num_examples, 'example')}")


@store.command()
def info(folder: StoreFolder, as_json: AsJson = False) -> None:
    """Show the settings, examples, models and files of a store."""
    from knnper.datastore.transfer import summarize

    summary = summarize(folder)
    if as_json:
        totals = {"num_examples": summary.num_examples, "num_free": summary.num_free}
        print_json({**to_jsonable_python(summary), **totals})
        return
    for name, value in _lines(summary):
        tell(f"{name}: {value}")
    names = summary.identity.spec.class_names
    rows = [
        (names[label] if names else str(label), str(count))
        for label, count in enumerate(summary.num_by_label)
    ]
    print_table(("class", "examples"), rows)


def _lines(summary: "StoreSummary") -> Iterator[tuple[str, str]]:
    settings = summary.identity.settings
    spec = summary.identity.spec
    yield "store", summary.identity.store_id
    yield "created", as_time(summary.identity.created)
    yield "examples", str(summary.num_examples)
    yield "arrived", " to ".join(map(as_time, summary.arrivals or ())) or "nothing has"
    layout = spec.input
    inputs = f"{layout.dtype} of shape {layout.shape}" if layout else "none are kept"
    yield "inputs", inputs
    yield "policy", settings.policy
    room = f"{summary.capacity} examples, room for {summary.num_free} more"
    yield "capacity", "not bounded" if summary.capacity is None else room
    budget = settings.budget_mb
    yield "budget", "not bounded" if budget is None else f"{budget:g} MB"
    roles = {summary.active: "searched", summary.previous: "can be rolled back to"}
    for version in summary.versions:
        yield (
            f"model {version.fingerprint[:12]}",
            f"{version.embedding_dim} numbers an embedding, "
            f"{roles.get(version.number, 'being embedded')}",
        )
    size = summary.index_bytes
    saved = f"{megabytes(size)} saved" if size else "not saved"
    yield "index", f"{settings.index.name}, {saved}"
    yield "files", f"{len(summary.files)}, {megabytes(sum(summary.files.values()))}"
    for name, size in summary.files.items():
        yield f"  {name}", megabytes(size)
    yield "erasure pending", "yes" if summary.is_erasing else "no"
    yield "writer", summary.writer or "none"


@store.command()
def verify(
    folder: StoreFolder,
    as_json: AsJson = False,
) -> None:
    """Check the database, the index and the files; exit with 1 on a problem."""
    from knnper.datastore.verify import verify as verify_store

    report = verify_store(folder)
    if as_json:
        print_json({"sound": not report.findings, **asdict(report)})
    elif not report.findings:
        examples = counted(report.num_examples, "example")
        rows = counted(report.num_rows, "input")
        tell(f"{folder} is sound: {examples}, {rows} and embeddings as written")
    else:
        tell(f"{folder}: {counted(len(report.findings), 'finding')}")
        for finding in report.findings:
            tell(f"  - {finding.problem}\n    to fix it: {finding.fix}")
        if report.salvage is not None:
            tell(f"knnper store rewrite {folder} --to NEW_FOLDER would copy:")
            _show_salvage(report.salvage)
    if report.findings:
        raise typer.Exit(RUN_FAILED)


@store.command()
def delete(
    folder: StoreFolder,
    ids: Annotated[
        list[int] | None,
        typer.Option("--id", help="Id of an example; may be repeated."),
    ] = None,
    external_ids: Annotated[
        list[str] | None,
        typer.Option("--external-id", help="Your name of an example; may be repeated."),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", help="A class, or its number; may be repeated."),
    ] = None,
    arrived_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Arrived at this time or later, as in 2026-03-31T09:30:00+02:00; UTC "
            "without an offset.",
        ),
    ] = None,
    arrived_before: Annotated[
        str | None,
        typer.Option("--before", metavar="TIME", help="Arrived before this time."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the examples that match all options, and erase their bytes."""
    if not any((ids, external_ids, labels, arrived_from, arrived_before)):
        raise typer.BadParameter(
            "give at least one of --id, --external-id, --label, --from and --before"
        )
    from knnper.datastore.examples import Selection
    from knnper.datastore.store import read_identity
    from knnper.datastore.verify import delete_examples

    spec = read_identity(folder).spec
    selection = Selection(
        ids=tuple(ids) if ids else None,
        external_ids=tuple(external_ids) if external_ids else None,
        labels=tuple(_label_number(text, spec) for text in labels) if labels else None,
        arrived_from=None if arrived_from is None else parse_time(arrived_from),
        arrived_before=None if arrived_before is None else parse_time(arrived_before),
    )
    selected, num_stored, missing = _select(folder, selection)
    for option, names in missing.items():
        if names:
            say(f"{folder} holds no example --{option} {', '.join(names)}")
    if len(selected):
        _require_consent(f"{len(selected)} of {num_stored} examples of {folder}", yes)
        delete_examples(folder, selected)
    if as_json:
        document = {
            "num_deleted": len(selected),
            "num_examples": num_stored - len(selected),
            "ids": selected.tolist(),
            "missing": missing,
        }
        print_json(document)
    elif len(selected):
        tell(f"{counted(len(selected), 'example')} deleted")
    if len(selected) == 0:
        say(f"no example is deleted: none in {folder} matches all options")
        raise typer.Exit(RUN_FAILED)


def _select(
    folder: Path, selection: "Selection"
) -> tuple["StoredIds", int, dict[str, list[str]]]:
    """Return the selected ids, the number stored, and the unknown ids and names."""
    from knnper.datastore.examples import Selection
    from knnper.datastore.store import open_rows

    ids = selection.ids or ()
    names = selection.external_ids or ()
    with open_rows(folder) as (_, rows):
        if selection.ids is None and selection.external_ids is None:
            # Damaged labels or times would select wrong examples, so check them first.
            # Ids stay usable, to delete the damaged examples.
            rows.contents()
        selected = rows.select(selection)
        num_stored = len(rows.select(Selection()))
        known_ids = set(rows.select(Selection(ids=ids)).tolist())
        named = rows.select(Selection(external_ids=names))
        known_names = set(rows.external_ids(named))
    missing = {
        "id": [str(example) for example in ids if example not in known_ids],
        "external-id": [name for name in names if name not in known_names],
    }
    return selected, num_stored, missing


def _require_consent(examples: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        say(f"Error: {examples} would be deleted for good; give --yes to agree")
        raise typer.Exit(WRONG_USAGE)
    typer.confirm(f"Delete {examples} for good?", abort=True, err=True)


def _label_number(text: str, spec: "StoreSpec") -> int:
    from knnper.data.dividing import clean_name, clean_names

    if text in spec.class_names:
        return spec.class_names.index(text)
    clean = clean_names(spec.class_names)
    if clean_name(text) in clean:
        return clean.index(clean_name(text))
    if text.isdecimal() and int(text) < spec.num_classes:
        return int(text)
    names = f" or one of: {', '.join(spec.class_names)}" if spec.class_names else ""
    largest = spec.num_classes - 1
    raise typer.BadParameter(
        f"--label: found {text!r}, expected a number from 0 to {largest}{names}"
    )


@store.command()
def export(
    folder: StoreFolder,
    target: Annotated[
        Path, typer.Argument(metavar="OUT.npz", help="The file to write.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
) -> None:
    """Write all examples with their embeddings to one file."""
    if target.suffix != ".npz":
        raise typer.BadParameter(f"{target}: expected a file that ends in .npz")
    from knnper.datastore.transfer import export_store

    number = export_store(folder, target, overwrite=overwrite)
    say(f"{counted(number, 'example')} of {folder} written to {target}")


@store.command()
def rewrite(
    folder: StoreFolder,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting, as in --set capacity=5000 or --set "
            "'index={name: factory, factory: SQ8}'; may be repeated.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="NEW_FOLDER",
            help="Copy the intact examples of a damaged store to a new one instead.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compact a store and change its settings, or copy its intact examples."""
    if target is not None:
        if changes:
            raise typer.BadParameter("found --to and --set; give one of them")
        _copy_intact(folder, target, as_json)
        return
    from knnper.datastore.store import configure_store, open_store, read_identity

    settings = read_identity(folder).settings
    if changes:
        settings = store_settings(to_jsonable_python(settings), changes)
        configure_store(folder, settings)
    with open_store(folder, writable=True) as opened:
        before = _megabytes_of(folder)
        opened.compact()
    if as_json:
        print_json(to_jsonable_python(settings))
    say(f"{folder} took {before} and takes {_megabytes_of(folder)}")


def _megabytes_of(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file())
    return megabytes(sum(path.stat().st_size for path in files))


def _copy_intact(folder: Path, target: Path, as_json: bool) -> None:
    from knnper.datastore.verify import salvage

    saved = salvage(folder, target)
    if as_json:
        print_json(asdict(saved))
        return
    tell(f"{target} holds the intact examples of {folder}:")
    _show_salvage(saved)


def _show_salvage(saved: "Salvage") -> None:
    tell(f"  {counted(saved.num_saved, 'example')} saved")
    if saved.lost:
        ids = ", ".join(map(str, saved.lost))
        tell(f"  {counted(len(saved.lost), 'example')} damaged and left out: {ids}")
    if saved.num_missing:
        tell(f"  {counted(saved.num_missing, 'example')} missing without a trace")
    if saved.num_changes_missing:
        changes = counted(saved.num_changes_missing, "change")
        tell(f"  {changes} missing: examples that they evicted are back")


@store.command()
def reembed(
    folder: StoreFolder,
    run: OptionalRun = None,
    roll_back: Annotated[
        bool,
        typer.Option(
            "--roll-back", help="Search the embeddings before the last re-embedding."
        ),
    ] = False,
) -> None:
    """Embed all raw inputs by another run's model, then search those embeddings."""
    from knnper.datastore.store import open_store

    if (run is not None) == roll_back:
        raise typer.BadParameter("give either --run RUN or --roll-back")
    if run is not None:
        _reembed(folder, run)
        return
    with open_store(folder, writable=True) as opened:
        opened.roll_back()
        say(f"{folder} is searched by the model {opened.fingerprint[:12]} again")


def _reembed(folder: Path, run: Path) -> None:
    from knnper.data.dividing import clean_names
    from knnper.datastore.store import open_store, read_identity
    from knnper.datastore.transfer import num_to_embed
    from knnper.simulation.trained_model import find_model

    spec = read_identity(folder).spec
    if spec.input is None:
        raise DataError(
            f"{folder} keeps no raw inputs, so it cannot be re-embedded; add the "
            f"examples to a new store: knnper store create NEW_FOLDER --model {run}"
        )
    model = find_model(run)
    with open_store(folder, writable=True) as opened:
        has_shape = model.spec.image_shape == spec.input.shape
        has_classes = clean_names(model.class_names) == clean_names(spec.class_names)
        if not has_shape or not has_classes:
            raise DataError(
                f"the model takes images of shape {model.spec.image_shape} of the "
                f"classes {', '.join(model.class_names)}; expected those of {folder}: "
                f"shape {spec.input.shape}, classes {', '.join(spec.class_names)}"
            )
        if opened.fingerprint == model.fingerprint:
            say(f"{folder} is embedded by the model of {run} already")
            return
        with counter("examples", is_kept=True) as progress:
            progress.start(num_to_embed(folder, model.fingerprint))
            opened.reembed(model.embed, model.fingerprint, progress.advance)
        say(
            f"{len(opened)} examples of {folder} are embedded by the model "
            f"{model.fingerprint[:12]} of {run}; to go back: "
            f"knnper store reembed {folder} --roll-back"
        )
