"""Links, experiments, commands and paths in the pages are those of the code."""

import itertools
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
import typer

from knnper.cli.app import app
from knnper.client.settings import read_client
from knnper.experiment import SECTIONS, load_experiment, parse_yaml, read_experiment
from knnper.simulation.workbench import experiment_catalogue

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "[!.]*/*.md", "docs/tutorials/*.md")
    for path in ROOT.glob(pattern)
    if path.parent.name != "runs"
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOLDERS = [
    *("papers", "client", "server", "strategies", "datastore", "simulation"),
    *("knnper", "tests", "docs"),
]
# What the guides tell the reader to write.
YET_TO_BE_WRITTEN = {
    "docs/methods/tempered_mean.md",
    "strategies/tempered_mean.py",
    "tests/strategies/test_tempered_mean.py",
    "knnper/data/json_lines.py",
    "tests/knnper_data/test_json_lines.py",
}
# The experiments of the others choose what their readers have just written.
PAGES_OF_WHAT_IS_THERE = [
    page for page in PAGES if not page.startswith("docs/tutorials/add_")
]
# Completes the excerpts of experiments.
REST = {
    "name": "page",
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 10},
    "model": {"name": "tiny_cnn"},
    "method": {"name": "knn_per"},
}

Listings = Callable[[str, str], list[str]]


def prose(page: str) -> str:
    """Return the text of a page without its listings."""
    return FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the headings of a page as links name them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-")
        for one in headings
    }


def commands(page: str, listings: Listings) -> Iterator[list[str]]:
    """Yield the words of each command line in the listings of a page.

    They end where the command does: at a pipe, a redirection, an ampersand.
    """
    for block in listings(page, "(?:sh|bash|console)"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            words = list(itertools.takewhile(lambda one: one not in "|>&", words))
            if words:
                yield words


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(target), f"{page} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_files_in_listings_can_be_read(
    page: str, listings: Listings, tmp_path: Path
) -> None:
    for code in listings(page, "python"):
        if named := re.match(r"# (\w+\.py)", code):
            (tmp_path / named[1]).write_text(code)
    for text in listings(page, "ya?ml"):
        document = parse_yaml(text, page)
        if "server" in document:
            (tmp_path / "client.yaml").write_text(text)
            read_client(tmp_path / "client.yaml")
        elif page in PAGES_OF_WHAT_IS_THERE and {*document} & {*SECTIONS} - {"name"}:
            catalogue = experiment_catalogue()
            load_experiment(REST | document, catalogue, source=page, folder=tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_typed(page: str, listings: Listings) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    for program, *words in commands(page, listings):
        if Path(program).name != "knnper":
            continue
        name, *arguments = words
        if name.startswith("-"):
            continue
        assert name in group.commands, f"{page}: knnper has no command {name}"
        command = group.commands[name]
        while isinstance(command, click.Group) and arguments:
            command = command.commands[arguments.pop(0)]
        # Parses the arguments and complains; runs nothing.
        context = command.make_context(name, arguments)
        path = ROOT / str(context.params.get("experiment"))
        if path.is_file():
            overrides = context.params["overrides"] or ()
            read_experiment(path, experiment_catalogue(), overrides)


@pytest.mark.parametrize("page", PAGES)
def test_files_in_commands_exist(page: str, listings: Listings) -> None:
    for words in commands(page, listings):
        code = {one for one in words if re.fullmatch(r"(tests|strategies)/.+", one)}
        there = {one for one in code if (ROOT / one).exists()}
        assert code - there <= YET_TO_BE_WRITTEN, words


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    for text in re.findall(r"`knnper ([a-z][^`]*)`", prose(page)):
        command: click.Command = group
        arguments = text.split()
        while isinstance(command, click.Group) and arguments:
            command = command.commands[arguments.pop(0)]
        known = {option for one in command.params for option in one.opts}
        known |= {"--help", "-h"}
        options = {word for word in arguments if word.startswith("-")}
        assert options <= known, f"{page}: knnper {text}"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str, listings: Listings) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    targets |= {f"bench-{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")}
    named = {words[1] for words in commands(page, listings) if words[0] == "make"}
    named |= set(re.findall(r"`make ([a-z_-]+)`", prose(page)))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", prose(page))
    places = (ROOT, (ROOT / page).parent)
    missing = {
        name for name in named if not any((one / name).exists() for one in places)
    }
    assert missing <= YET_TO_BE_WRITTEN


@pytest.mark.parametrize("page", sorted({*PAGES_OF_WHAT_IS_THERE} - {"CHANGELOG.md"}))
def test_modules_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"\bknnper(?:_cli)?(?:\.\w+)+", text)):
        # A name with capitals, or the last one, may be an attribute.
        path = re.sub(r"\.[A-Z].*", "", name)
        found = pkgutil.resolve_name(path)
        assert found is not None
