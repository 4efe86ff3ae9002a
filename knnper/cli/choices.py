"""``knnper list``: the choices of an experiment and their settings."""

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from knnper.cli.options import AsJson
from knnper.cli.terminal import print_json, say, tell
from knnper.simulation.experiments import shipped_experiments

# Modules that load torch are imported inside functions, to keep `knnper --help` fast.
if TYPE_CHECKING:
    from knnper.setting_docs import SettingDoc

_PROSE_WIDTH = 80  # characters, without a terminal
_LEAST_SUMMARY = 20
_GAP = "  "

# The command of a file by a key that it has; a comparison has a grid, too.
_COMMAND_OF = {
    "data": "simulate",
    "rows": "compare",
    "extends": "compare",
    "grid": "sweep",
}
Name = Annotated[
    str | None,
    typer.Argument(help="Show this choice with its settings.", show_default=False),
]


class Choosable(StrEnum):
    """Parts of an experiment that have a list of choices."""

    METHODS = "methods"
    PERSONALIZATIONS = "personalizations"
    DATA = "data"
    PARTITIONS = "partitions"
    MODELS = "models"
    OPTIMIZERS = "optimizers"
    COMPRESSIONS = "compressions"
    POLICIES = "policies"
    METRICS = "metrics"
    EXPERIMENTS = "experiments"
    SECTIONS = "sections"


# Section of an experiment that chooses an entry and holds its settings.
_SECTIONS: Mapping[Choosable, str] = {
    Choosable.METHODS: "method",
    Choosable.PERSONALIZATIONS: "personalization",
    Choosable.DATA: "data",
    Choosable.PARTITIONS: "partition",
    Choosable.MODELS: "model",
    Choosable.OPTIMIZERS: "training.optimizer",
    Choosable.COMPRESSIONS: "training.compression",
    Choosable.POLICIES: "personalization.store.policy",
    Choosable.METRICS: "run.metrics",
}
_BY_NAME_ALONE = (Choosable.POLICIES, Choosable.METRICS)


@dataclass(frozen=True)
class CatalogueEntry:
    """A choice of an experiment, by name.

    Attributes
    ----------
    about
        The rest of the docstring, in paragraphs.
    facts
        Further facts, by name.
    json_fields
        Further fields of ``--json``.
    settings_type
        The dataclass of its settings; None where it has none.
    """

    name: str
    title: str
    summary: str
    about: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    json_fields: Mapping[str, Any] = field(default_factory=dict)
    settings_type: Any = None

    def as_document(self) -> dict[str, Any]:
        """Return plain values for ``--json``; of the settings only the names."""
        names = {"name": self.name, "title": self.title, "summary": self.summary}
        settings = fields(self.settings_type) if self.settings_type else ()
        listed = [setting.name for setting in settings]
        return {**names, **self.json_fields, "settings": listed}


def entries_of(part: Choosable) -> list[CatalogueEntry]:
    """Return all choices of one kind."""
    return list(_FINDERS[part]())


def _methods() -> Iterator[CatalogueEntry]:
    from knnper.strategies.catalogue import METHODS

    for name, spec in METHODS.items():
        server = spec.server_state
        server += "; a round's updates" if spec.holds_all_updates else ""
        yield CatalogueEntry(
            name,
            spec.title,
            spec.summary,
            _paragraphs_of(inspect.getmodule(spec)),
            {
                "source": spec.source,
                "a client sends": f"{spec.upload} (models a round)",
                "a client gets": f"{spec.download} (models a round)",
                "a client keeps": f"{spec.client_state} (models)",
                "the server keeps": f"{server} (models)",
                "unseen clients get": spec.unseen,
                "on top": spec.personalization,
            },
            {
                "upload_models": spec.upload,
                "download_models": spec.download,
                "client_state_models": spec.client_state,
                "server_state_models": server,
                "unseen_clients": spec.unseen,
                "server_holds_all_updates": spec.holds_all_updates,
                "source": spec.source,
                "personalization": spec.personalization,
            },
            spec.settings_type,
        )


def _personalizations() -> Iterator[CatalogueEntry]:
    from knnper.strategies.catalogue import PERSONALIZERS

    for name, spec in PERSONALIZERS.items():
        needs = ["one model a client"] * spec.needs_one_model
        needs += ["data of the server's"] * spec.needs_proxy
        about = "" if name == "none" else _paragraphs_of(inspect.getmodule(spec))
        source = getattr(spec, "source", "")
        facts = {"source": source, "unseen clients": spec.unseen}
        facts["needs"] = ", ".join(needs)
        yield CatalogueEntry(
            name,
            spec.title,
            spec.summary,
            about,
            {key: value for key, value in facts.items() if value},
            {
                "unseen_clients": spec.unseen,
                "needs": ", ".join(needs),
                "source": source,
            },
            spec.settings_type,
        )


def _titled(known: Mapping[str, Any]) -> Iterator[CatalogueEntry]:
    for name, spec in known.items():
        # An object's docstring is that of its class, which describes the catalogue.
        about = _paragraphs_of(spec) if isinstance(spec, type) else ""
        is_known = about.startswith("Settings of ") or about in spec.summary
        yield CatalogueEntry(
            name,
            spec.title,
            spec.summary,
            "" if is_known else about,
            settings_type=spec.settings_type,
        )


def _data() -> Iterator[CatalogueEntry]:
    from knnper.data.catalogue import DATA_SETS

    return _titled(DATA_SETS)


def _partitions() -> Iterator[CatalogueEntry]:
    from knnper.simulation.partition.schemes import PARTITIONS

    return _titled(PARTITIONS)


def _models() -> Iterator[CatalogueEntry]:
    from knnper.models import MODELS

    return _titled(MODELS)


def _optimizers() -> Iterator[CatalogueEntry]:
    from knnper.strategies.core.optimizers import OPTIMIZERS

    for name, settings_type in OPTIMIZERS.items():
        summary = f"torch.optim.{name}, anew in every round"
        if name == "SGD":
            summary += ", with training.momentum and training.weight_decay"
        yield CatalogueEntry(name, "", summary, settings_type=settings_type)


def _compressions() -> Iterator[CatalogueEntry]:
    from knnper.strategies.core.compression import COMPRESSORS

    for name, kind in COMPRESSORS.items():
        summary, _, about = _paragraphs_of(kind).partition("\n\n")
        yield CatalogueEntry(name, "", summary, about, settings_type=kind.settings_type)


def _policies() -> Iterator[CatalogueEntry]:
    from knnper.datastore.policy import POLICIES

    for name, policy in POLICIES.items():
        summary, _, about = _paragraphs_of(type(policy)).partition("\n\n")
        yield CatalogueEntry(name, "", summary, about)


def _metrics() -> Iterator[CatalogueEntry]:
    from knnper.metrics import METRICS

    for name, metric in METRICS.items():
        better = "lower is better" if metric.lower_is_better else "higher is better"
        about = _paragraphs_of(metric.compute) if metric.compute else ""
        first, _, about = about.removeprefix("Return ").partition("\n\n")
        summary = f"{first.rstrip('.')}; {better}" if first else better
        yield CatalogueEntry(name, metric.title, summary, about)


def _sections() -> Iterator[CatalogueEntry]:
    from knnper.client.settings import ClientSettings
    from knnper.experiment import RunSettings, TrainingSettings
    from knnper.privacy_settings import PrivacySettings

    types: Mapping[str, type] = {
        "training": TrainingSettings,
        "privacy": PrivacySettings,
        "run": RunSettings,
        "client.yaml": ClientSettings,
    }
    for name, settings_type in types.items():
        summary, _, about = _paragraphs_of(settings_type).partition("\n\n")
        yield CatalogueEntry(name, "", summary, about, settings_type=settings_type)


def _experiments() -> Iterator[CatalogueEntry]:
    from knnper.yaml_text import parse_yaml

    for name, path in shipped_experiments().items():
        text = path.read_text(encoding="utf-8")
        document = parse_yaml(text, str(path))
        # Each file begins with a paragraph that describes it, as a comment.
        about, _, _ = text.replace("\n# ", " ").removeprefix("# ").partition("\n")
        command = next(_COMMAND_OF[key] for key in _COMMAND_OF if key in document)
        yield CatalogueEntry(f"knnper {command} {name}", "", about.rstrip(":."))


_FINDERS = {
    Choosable.METHODS: _methods,
    Choosable.PERSONALIZATIONS: _personalizations,
    Choosable.DATA: _data,
    Choosable.PARTITIONS: _partitions,
    Choosable.MODELS: _models,
    Choosable.OPTIMIZERS: _optimizers,
    Choosable.COMPRESSIONS: _compressions,
    Choosable.POLICIES: _policies,
    Choosable.METRICS: _metrics,
    Choosable.EXPERIMENTS: _experiments,
    Choosable.SECTIONS: _sections,
}


def _paragraphs_of(documented: Any) -> str:
    """Return a docstring without its attributes."""
    text, _, _ = (inspect.getdoc(documented) or "").partition("\nAttributes\n-----")
    return text.strip()


def list_choices(
    part: Annotated[
        Choosable, typer.Argument(metavar="PART", help="Part of an experiment to list.")
    ],
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """List the choices for a part of an experiment, or show one with its settings."""
    if part is Choosable.EXPERIMENTS and name is not None:
        _show_experiment(name, as_json)
    elif name is not None:
        _show(part, name, as_json)
    elif as_json:
        print_json(_document(part))
    else:
        _print_lines(entries_of(part))
        if part is Choosable.METHODS:
            tell("\nPersonalisers on top of a method (knnper list personalizations):\n")
            _print_lines(entries_of(Choosable.PERSONALIZATIONS))
        detail = "its file" if part is Choosable.EXPERIMENTS else "its settings"
        say(f"\nTo show one with {detail}: knnper list {part} NAME")


def _document(part: Choosable) -> Any:
    entries = entries_of(part)
    if part is Choosable.EXPERIMENTS:
        return [{"command": entry.name, "about": entry.summary} for entry in entries]
    documents = [entry.as_document() for entry in entries]
    if part is not Choosable.METHODS:
        return documents
    on_top = entries_of(Choosable.PERSONALIZATIONS)
    return {
        "methods": documents,
        "personalizations": [entry.as_document() for entry in on_top],
    }


def _print_lines(entries: Sequence[CatalogueEntry]) -> None:
    """Print a line for each entry: name, title and, cut to fit, the summary."""
    console = Console()
    longest = max(len(entry.name) for entry in entries)
    for entry in entries:
        text = ": ".join(filter(None, (entry.title, entry.summary)))
        if console.is_terminal:
            room = max(console.width - longest - len(_GAP), _LEAST_SUMMARY)
            text = textwrap.shorten(text, room, placeholder="...")
        tell(f"{entry.name:{longest}}{_GAP}{text}")


def _show(part: Choosable, name: str, as_json: bool) -> None:
    """Print one choice with its facts and settings."""
    of_all = {part: entries_of(part)}
    if part is Choosable.METHODS:
        of_all[Choosable.PERSONALIZATIONS] = entries_of(Choosable.PERSONALIZATIONS)
    known = {
        entry.name: (kind, entry)
        for kind, entries in of_all.items()
        for entry in entries
    }
    _require(name, known)
    kind, entry = known[name]
    settings = [*_flat(entry.settings_type)] if entry.settings_type else []
    if as_json:
        listed = [
            {
                "key": key,
                "type": setting.kind.replace("`", ""),
                "default": setting.default,
                "meaning": setting.meaning,
            }
            for key, setting in settings
        ]
        print_json({**entry.as_document(), "settings": listed})
        return
    tell(f"{entry.name}: {entry.title}" if entry.title else entry.name)
    tell_wrapped(entry.summary)
    if entry.about:
        tell()
        tell_wrapped(entry.about.replace("`", ""))
    if entry.facts:
        tell()
        width = max(map(len, entry.facts))
        for fact, value in entry.facts.items():
            tell_wrapped(value, f"{fact:{width}}{_GAP}")
    _print_settings(kind, entry.name, settings)


def _print_settings(
    kind: Choosable, name: str, settings: "Sequence[tuple[str, SettingDoc]]"
) -> None:
    if kind in _BY_NAME_ALONE:
        tell(f"\nAn experiment chooses it by its name in {_SECTIONS[kind]}.")
        return
    if kind is not Choosable.SECTIONS:
        tell()
        tell(f"An experiment chooses it by {_SECTIONS[kind]}: {{name: {name}}}")
        if not settings:
            tell("There is nothing to set.")
            return
        tell("Settings beside the name:")
    for key, setting in settings:
        default = (
            "required" if setting.default is None else f"default {setting.default}"
        )
        kind_text = setting.kind.replace("`", "")
        tell()
        tell_wrapped(f"{kind_text}; {default}", f"  {key}: ", indent=4)
        if setting.meaning:
            tell_wrapped(setting.meaning.replace("`", ""), " " * 4)


def _flat(settings_type: Any, path: str = "") -> "Iterator[tuple[str, SettingDoc]]":
    """Yield settings by dotted key; nested settings follow their parent."""
    from knnper.setting_docs import setting_docs

    for setting in setting_docs(settings_type):
        key = f"{path}{setting.key}"
        yield key, setting
        for choice, member in setting.inner:
            yield from _flat(member, f"{key}{choice}.")


def _show_experiment(name: str, as_json: bool) -> None:
    """Print the file of a shipped experiment."""
    files = shipped_experiments()
    _require(name, files)
    text = files[name].read_text(encoding="utf-8")
    if as_json:
        from knnper.yaml_text import parse_yaml

        print_json(parse_yaml(text, str(files[name])))
        return
    say(f"{files[name]}:\n")
    tell(text, nl=False)


def _require(name: str, known: Mapping[str, Any]) -> None:
    from knnper.settings import alternatives

    if name not in known:
        message = f"found {name!r}; {alternatives(name, known)}"
        raise typer.BadParameter(message, param_hint="NAME")


def tell_wrapped(text: str, first: str = "", indent: int | None = None) -> None:
    """Print paragraphs wrapped to the terminal, after the words ``first``.

    Indented lines, such as equations, are not wrapped.
    """
    console = Console()
    width = console.width if console.is_terminal else _PROSE_WIDTH
    behind = " " * (len(first) if indent is None else indent)
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            tell()
        if any(line.startswith((" ", "- ")) for line in paragraph.splitlines()):
            tell(textwrap.indent(paragraph, behind))
            continue
        beginning = behind if number else first
        words = " ".join(paragraph.split())
        tell(
            textwrap.fill(
                words, width, initial_indent=beginning, subsequent_indent=behind
            )
        )
