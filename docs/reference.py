"""Generate the reference pages from the code: settings, methods, commands, Python.

A hook of mkdocs; the pages exist only in the built site.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperGroup

from knnper.cli.app import app
from knnper.client.settings import ClientDocument
from knnper.experiment import RunSettings, TrainingSettings
from knnper.privacy_settings import PrivacySettings
from knnper.server.settings import ServerSettings
from knnper.setting_docs import SettingDoc, documented, setting_docs
from knnper.settings import Settings
from knnper.simulation.batches.comparison import ComparisonSettings
from knnper.simulation.batches.sweep import SweepSettings
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS, PERSONALIZERS
from knnper.strategies.core.method import Method, Personalizer
from papers.catalogue import FIGURES, FigureFileSettings

PYTHON = {
    "Runs": ["knnper.simulation.interface"],
    "A local memory": ["knnper.datastore.local_memory", "knnper.datastore.memory"],
    "Experiments": [
        "knnper.experiment",
        "knnper.privacy_settings",
        "knnper.experiment_file",
        "knnper.settings",
    ],
    "Methods": ["knnper.strategies.core.method"],
    "Data": ["knnper.data.examples"],
    "Models": ["knnper.embedding_model", "knnper.models"],
    "Memory and prediction": ["knnper.datastore.store", "knnper.datastore.prediction"],
    "Results": ["knnper.server.results"],
}
"""Modules that users' own code imports, by subject."""


FILES: Mapping[str, type[Settings]] = {
    "The file of a sweep": SweepSettings,
    "The file of a comparison": ComparisonSettings,
    "The file of a client": ClientDocument,
    "The file of a server": ServerSettings,
    "The file of a figure": FigureFileSettings,
    **{f"`options` of {name}": figure.settings for name, figure in FIGURES.items()},
}
"""Settings of the other YAML files."""

CARDS: Mapping[str, Mapping[str, type[Method]]] = {
    "methods": METHODS,
    "personalization": PERSONALIZERS,
}
"""By folder: entries with a page of their own, a card and the notes in the folder."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the pages of the folder."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for folder, entries in CARDS.items():
        for name, entry in entries.items():
            place = f"{folder}/{name}.md"
            if place not in files.src_uris:
                title = f"# {_title_of(entry)} (`{name}`)\n"
                files.append(File.generated(config, place, content=title))
    return files


def pages() -> dict[str, str]:
    """Generate the pages of the reference as Markdown, by name."""
    return {"settings": settings(), "commands": commands(), "python": python()}


def settings() -> str:
    """Generate the page of all settings of YAML files."""
    catalogue = experiment_catalogue()
    seen: dict[type, str] = {}
    parts = [
        "# Settings",
        "Every key of an experiment, its type, default and meaning. How a file is "
        "read, and what may be left out: [configuration](../configuration.md).",
    ]
    for section in ("data", "partition", "model"):
        parts += chosen(section, getattr(catalogue, section), seen)
    parts += ["## `training`", *described(TrainingSettings, "training", seen)]
    for section in ("method", "personalization"):
        parts += chosen(section, getattr(catalogue, section), seen)
    parts += ["## `privacy`", *described(PrivacySettings, "privacy", seen)]
    parts += ["## `run`", *described(RunSettings, "run", seen)]
    for title, settings_type in FILES.items():
        parts += [f"## {title}", *described(settings_type, "", seen)]
    return "\n\n".join(parts) + "\n"


def chosen(
    section: str, types: Mapping[str, Any], seen: dict[type, str]
) -> Iterator[str]:
    """Yield the part of a section with choices by ``name``."""
    yield f"## `{section}`"
    for name, settings_type in types.items():
        label = f"{section}: {{name: {name}}}"
        yield f"### `{label}` {{ #{section}-{name} }}"
        if settings_type in seen:
            yield f"As `{seen[settings_type]}` above."
        else:
            seen[settings_type] = label
            yield from described(settings_type, section, seen)


def described(settings_type: Any, path: str, seen: dict[type, str]) -> Iterator[str]:
    """Yield the description of a settings dataclass, then a table of its fields.

    Nested settings follow, each under its path in a file. Settings in ``seen``, which
    were described under another path, are named but not repeated.
    """
    yield plain(documented(settings_type)[0])
    settings = [*setting_docs(settings_type)]
    lines = [f"| {' | '.join(_cells(setting))} |" for setting in settings]
    if lines:
        yield "\n".join(
            ["| key | type | default | meaning |", "| --- " * 4 + "|", *lines]
        )
    for setting in settings:
        for choice, member in setting.inner:
            place = f"{path}.{setting.key}"
            yield f"**`{place.lstrip('.')}{choice}`**"
            if member in seen:
                yield f"As `{seen[member]}` above."
            else:
                seen[member] = f"{place}{choice}"
                yield from described(member, place, seen)


def _cells(setting: SettingDoc) -> tuple[str, ...]:
    if not setting.meaning:
        raise KeyError(f"the docstring does not describe {setting.key}")
    default = setting.default
    shown = "*required*" if default is None else f"`{default or ' '}`"
    return f"`{setting.key}`", setting.kind, shown, plain(setting.meaning)


def plain(text: str) -> str:
    """Convert a docstring's markup to Markdown that is safe in a table."""
    return re.sub(r"`{1,2}([^`]+)`{1,2}", r"`\1`", text).replace("|", r"\|").strip()


def card(entry: type[Method], section: str) -> Iterator[str]:
    """Yield the description of a method in its file and class."""
    module = inspect.getmodule(entry)
    is_base = entry.__module__ == Method.__module__
    yield plain(inspect.getdoc(entry if is_base else module) or "")
    rows = [("source", entry.source)] if hasattr(entry, "source") else []
    if not issubclass(entry, Personalizer):
        rows += [
            ("up, in models a round", entry.upload),
            ("down, in models a round", entry.download),
            ("a client keeps, in models", entry.client_state),
            ("the server keeps, in models", _server_state(entry)),
        ]
    rows += [("unseen clients get", entry.unseen)]
    lines = [f"| {key} | {value} |" for key, value in rows]
    yield "\n".join(["| | |", "| --- | --- |", *lines])
    yield "## Settings"
    table = [*described(entry.settings_type, section, {})][1:]
    yield from table or ["None."]


def listed(folder: str, entries: Mapping[str, type[Method]]) -> str:
    """Generate the table of the methods, or of the personalisers."""
    if folder == "methods":
        head = [
            "method",
            "name",
            "up",
            "down",
            "client state",
            "server state",
            "unseen",
        ]
    else:
        head = ["personalisation", "name", "what a client is served", "unseen"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, entry in entries.items():
        cells = [f"[{_title_of(entry)}]({folder}/{name}.md)", f"`{name}`"]
        if folder == "methods":
            cells += [
                entry.upload,
                entry.download,
                entry.client_state,
                _server_state(entry),
            ]
        else:
            cells.append(entry.summary)
        lines.append(f"| {' | '.join([*cells, entry.unseen])} |")
    return "\n".join(lines)


def _title_of(entry: type[Method]) -> str:
    return entry.title or "As it is"


def _server_state(entry: type[Method]) -> str:
    held = "; all updates of a round at once" if entry.holds_all_updates else ""
    return entry.server_state + held


def commands() -> str:
    """Generate the page of the command line from the commands' help."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return "# Commands\n\n" + "\n\n".join(_explained(group, "knnper")) + "\n"


def _explained(command: Any, name: str) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    if isinstance(command, TyperGroup):
        yield inspect.cleandoc(command.help or "")
        for word in command.list_commands(context):
            member = command.get_command(context, word)
            if member is not None and not member.hidden:
                yield f"{'#' * (1 + len(name.split()))} `{name} {word}`"
                yield from _explained(member, f"{name} {word}")
        return
    yield inspect.cleandoc(command.help or "").replace("\b\n", "")
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{name} {usage}\n```"
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record and "--help" not in record[0]:
            meaning = " ".join(record[1].split()).replace("|", r"\|")
            rows.append(f"| `{record[0].replace('|', ' or ')}` | {meaning} |")
    if rows:
        yield "\n".join(["| argument or option | meaning |", "| --- | --- |", *rows])


def python() -> str:
    """Generate the page of the modules that users' own code imports."""
    parts = ["# Python interface"]
    for subject, modules in PYTHON.items():
        parts += [f"## {subject}", *(f"::: {module}" for module in modules)]
    return textwrap.dedent("\n\n".join(parts)) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Add a method's card; replace links to files that are not pages by their text."""
    place = Path(page.file.src_uri)
    entry = None
    if place.parent.name in CARDS:
        entry = CARDS[place.parent.name].get(place.stem)
    if entry is not None:
        title, notes = markdown.split("\n", 1)
        markdown = "\n\n".join([title, *card(entry, place.parent.name), notes])
    for name, methods in CARDS.items():
        markdown = markdown.replace(f"<!-- table of {name} -->", listed(name, methods))
    folder = Path(config.docs_dir).resolve()
    base = folder / place.parent

    def shown(link: re.Match[str]) -> str:
        outside = not (base / link[2]).resolve().is_relative_to(folder)
        return link[1] if outside else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\.[^)#]*)(?:#[^)]*)?\)", shown, markdown)
