"""Read the pages of the documentation: their prose, listings, links and commands."""

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "[!.]*/*.md", ".github/**/*.md", "docs/*/*.md")
    for path in ROOT.glob(pattern)
    if path.parent.name != "runs"
)


def pages_with(find: Callable[[str], Iterable[object]]) -> list[str]:
    """Return the pages on which ``find`` yields at least one item."""
    return [page for page in PAGES if any(True for _ in find(page))]


def read_page(page: str) -> str:
    """Return the text of a page, which is named from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


def read_prose(page: str) -> str:
    """Return the text of a page without its listings."""
    return FENCED.sub("", read_page(page))


def read_listings(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language, a regular expression."""
    fenced = rf"^```{language}\n(.*?)^```$"
    return re.findall(fenced, read_page(page), re.MULTILINE | re.DOTALL)


def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in headings
    }


def find_links(page: str) -> list[str]:
    """Return the relative links in the prose of a page."""
    links = re.findall(r"\]\(([^)\s]+)\)", read_prose(page))
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def find_commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each shell command in the listings of a page.

    A command ends at a pipe, a redirection or an ampersand.
    """
    for listing in read_listings(page, "(?:sh|bash|console)"):
        for line in listing.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            words = list(itertools.takewhile(lambda word: word not in "|>&", words))
            if words:
                yield words


def find_knnper_commands(page: str) -> list[list[str]]:
    """Return the arguments of each ``knnper`` command in the listings of a page."""
    return [
        arguments
        for program, *arguments in find_commands(page)
        if Path(program).name == "knnper" and not arguments[0].startswith("-")
    ]


def find_quoted_commands(page: str) -> list[str]:
    """Return the ``knnper`` commands that the prose of a page quotes.

    The changelog also names commands that were removed.
    """
    if page == "CHANGELOG.md":
        return []
    return re.findall(r"`knnper ([a-z][^`]*)`", read_prose(page))


def find_make_targets(page: str) -> set[str]:
    """Return the targets of make in the listings and the prose of a page."""
    in_listings = {
        words[1] for words in find_commands(page) if words[0] == "make" and words[1:]
    }
    return in_listings | set(re.findall(r"`make ([a-z_-]+)", read_prose(page)))
