"""Links, experiments, commands and paths on the pages exist in the project.

Each test runs on the pages that have something for it to check.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
import typer
from fastapi.routing import APIRoute
from mkdocs.config import load_config

from docs.menu import on_config
from knnper.cli.app import app
from knnper.client.service.endpoints import router
from knnper.client.settings import read_client
from knnper.data.catalogue import DATA_SETS, SITE_DATA
from knnper.experiment import SECTIONS
from knnper.experiment_file import load_experiment, read_experiment
from knnper.simulation.batches.comparison import read_comparison
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS
from knnper.yaml_text import parse_yaml
from tests.docs.pages import (
    PAGES,
    ROOT,
    find_anchors,
    find_commands,
    find_knnper_commands,
    find_links,
    find_make_targets,
    find_quoted_commands,
    pages_with,
    read_listings,
    read_page,
    read_prose,
)

FOLDERS = [
    *("papers", "client", "server", "strategies", "datastore", "simulation"),
    *("knnper", "tests", "docs"),
]
# Files that the guides ask the reader to write.
FILES_OF_THE_READER = {
    "docs/methods/tempered_mean.md",
    "strategies/tempered_mean.py",
    "tests/strategies/test_tempered_mean.py",
    "knnper/data/json_lines.py",
    "tests/knnper_data/test_json_lines.py",
}
MODULES_OF_THE_READER = {"knnper.strategies.tempered_mean", "knnper.data.json_lines"}
# Their experiments and modules use code that the reader has just written.
GUIDES_WITH_CODE_OF_THE_READER = ("docs/adding_a_",)
# Completes the excerpts of experiments.
REST_OF_THE_EXPERIMENT = {
    "name": "page",
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 10},
    "model": {"name": "tiny_cnn"},
    "method": {"name": "knn_per"},
}


def find_clients(page: str) -> list[str]:
    """Return the client files in the listings of a page."""
    texts = read_listings(page, "ya?ml")
    return [text for text in texts if "server" in parse_yaml(text, page)]


def find_experiments(page: str) -> list[Mapping[str, object]]:
    """Return the experiments, whole or in part, in the listings of a page."""
    if page.startswith(GUIDES_WITH_CODE_OF_THE_READER):
        return []
    documents = [parse_yaml(text, page) for text in read_listings(page, "ya?ml")]
    return [
        document
        for document in documents
        if "server" not in document and {*document} & {*SECTIONS} - {"name"}
    ]


def find_comparisons(page: str) -> list[str]:
    """Return the whole files of comparisons in the listings of a page."""
    if page.startswith("docs/tutorials/"):  # with code of the reader; a test runs it
        return []
    texts = read_listings(page, "ya?ml")
    return [
        text for text in texts if {"rows", "reference"} <= {*parse_yaml(text, page)}
    ]


def find_files_in_commands(page: str) -> set[str]:
    """Return the tests and strategies that the commands of a page name."""
    words = {word for command in find_commands(page) for word in command}
    return {word for word in words if re.fullmatch(r"(tests|strategies)/.+", word)}


def find_named_files(page: str) -> list[str]:
    """Return the paths of the project that the prose of a page names."""
    return re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", read_prose(page))


def find_named_modules(page: str) -> set[str]:
    """Return the modules and attributes of knnper that a page names."""
    if page == "CHANGELOG.md" or page.startswith(GUIDES_WITH_CODE_OF_THE_READER):
        return set()
    return set(re.findall(r"\bknnper(?:\.\w+)+", read_page(page)))


def find_imports(page: str) -> set[tuple[str, str]]:
    """Return modules and names that the Python listings of a page import of knnper."""
    trees = [ast.parse(listing) for listing in read_listings(page, "python")]
    return {
        (node.module, alias.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        if node.module.startswith("knnper") and node.module not in MODULES_OF_THE_READER
        for alias in node.names
    }


def command_group() -> click.Group:
    """Return the command ``knnper``."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    return group


@pytest.mark.parametrize("page", pages_with(find_links))
def test_links_lead_to_pages_and_headings(page: str) -> None:
    for link in find_links(page):
        name, _, anchor = unquote(link).partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}, which does not exist"
        if anchor:
            known = find_anchors(target)
            assert anchor in known, f"{page} links to {link}: no such heading"


@pytest.mark.parametrize("page", pages_with(find_clients))
def test_client_files_in_listings_are_valid(page: str, tmp_path: Path) -> None:
    for text in find_clients(page):
        (tmp_path / "client.yaml").write_text(text)
        assert read_client(tmp_path / "client.yaml")


@pytest.mark.parametrize("page", pages_with(find_experiments))
def test_experiments_in_listings_are_valid(page: str, tmp_path: Path) -> None:
    # An experiment may name classes in the modules that the page lists.
    for code in read_listings(page, "python"):
        if title := re.match(r"# (\w+\.py)", code):
            (tmp_path / title[1]).write_text(code)
    catalogue = experiment_catalogue()
    for document in find_experiments(page):
        complete = REST_OF_THE_EXPERIMENT | dict(document)
        assert load_experiment(complete, catalogue, source=page, folder=tmp_path)


@pytest.mark.parametrize("page", pages_with(find_comparisons))
def test_comparisons_in_listings_are_valid(page: str, tmp_path: Path) -> None:
    for text in find_comparisons(page):
        (tmp_path / "comparison.yaml").write_text(text)
        assert read_comparison(tmp_path / "comparison.yaml").variants


@pytest.mark.parametrize("page", pages_with(find_knnper_commands))
def test_commands_in_listings_have_valid_arguments(page: str) -> None:
    group = command_group()
    for name, *words in find_knnper_commands(page):
        assert name in group.commands, f"{page}: knnper has no command {name}"
        command, arguments = group.commands[name], words
        while isinstance(command, click.Group) and arguments:
            command = command.commands[arguments.pop(0)]
        # Parses the arguments without running the command.
        context = command.make_context(name, arguments)
        path = ROOT / str(context.params.get("experiment"))
        if path.is_file():
            overrides = context.params["overrides"] or ()
            read_experiment(path, experiment_catalogue(), overrides)


@pytest.mark.parametrize("page", pages_with(find_files_in_commands))
def test_files_in_commands_exist(page: str) -> None:
    for name in find_files_in_commands(page):
        assert (ROOT / name).exists() or name in FILES_OF_THE_READER, name


@pytest.mark.parametrize("page", pages_with(find_quoted_commands))
def test_commands_in_prose_have_valid_options(page: str) -> None:
    for text in find_quoted_commands(page):
        command: click.Command = command_group()
        arguments = text.split()
        while isinstance(command, click.Group) and arguments:
            command = command.commands[arguments.pop(0)]
        known = {name for parameter in command.params for name in parameter.opts}
        options = {word for word in arguments if word.startswith("-")}
        assert options <= known | {"--help", "-h"}, f"{page}: knnper {text}"


@pytest.mark.parametrize("page", pages_with(find_make_targets))
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    targets |= {f"bench-{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")}
    assert find_make_targets(page) <= targets


@pytest.mark.parametrize("page", pages_with(find_named_files))
def test_files_named_in_prose_exist(page: str) -> None:
    folders = (ROOT, (ROOT / page).parent)
    for name in find_named_files(page):
        exists = any((folder / name).exists() for folder in folders)
        assert exists or name in FILES_OF_THE_READER, f"{page}: {name}"


@pytest.mark.parametrize("page", pages_with(find_named_modules))
def test_modules_named_on_pages_exist(page: str) -> None:
    for name in find_named_modules(page):
        # A name with capitals is an attribute; so may be the last part.
        module = re.sub(r"\.[A-Z].*", "", name)
        assert pkgutil.resolve_name(module) is not None


@pytest.mark.parametrize("page", pages_with(find_imports))
def test_imports_in_listings_exist(page: str) -> None:
    for module, name in find_imports(page):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_every_page_is_in_the_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("mkdocs.yml")
    on_config(config)
    menu = re.findall(r"[\w/]+\.md", str(config.nav))
    assert len(menu) == len(set(menu))
    written = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    written -= {page for page in written if page.startswith("results/")}
    methods = {f"methods/{name}.md" for name in METHODS}
    assert written | methods <= {*menu}


@pytest.mark.parametrize("name", sorted({*DATA_SETS, *SITE_DATA}))
def test_every_kind_of_data_is_on_the_page_of_data(name: str) -> None:
    assert re.search(rf"(`|name: ){name}\b", read_page("docs/data.md"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (method, route.path)
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in sorted(route.methods or ())
    ],
)
def test_every_path_of_the_service_is_on_its_page(method: str, path: str) -> None:
    rows = [row for row in read_page("docs/service.md").splitlines() if row[:1] == "|"]
    path = re.sub(r"\{.*?\}", "{id}", path)
    assert any(f"`{method} " in row and f"{path}`" in row for row in rows)
