"""The page: valid, self-contained, told to whoever cannot see it, and escaped."""

import json
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from knnper.simulation.reports.figure import INK, SERIES, colors_of
from knnper.simulation.reports.report import (
    Report,
    as_html,
    as_markdown_report,
    report_of,
    write_figures,
)
from knnper.simulation.reports.tables import markdown_text
from tests.simulation.reporting.made_runs import made_run
from tests.simulation.reporting.parsed_page import Page

WEIRD = 'a<b>&"c|'


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return the report of two seeds of two setups, and of one of another method."""
    root = tmp_path_factory.mktemp("runs")
    paths = [
        made_run(root / f"{WEIRD}{seed}{rate}", seed=seed, rate=rate)
        for rate in (1, 2)
        for seed in (0, 1)
    ]
    paths.append(made_run(root / "local", method="local", rate=1))
    counts = {
        "class_names": [WEIRD, "dog"],
        "clients": [
            {"client": "0", "seen": True, "train": [1, 2]}
            | {"validation": [0, 1], "test": [1, 1]}
        ],
    }
    (paths[0] / "partition.json").write_text(json.dumps(counts))
    return report_of(paths)


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return as_html(report)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_every_section_is_there(report: Report, page: Page) -> None:
    assert all(section.picture for section in report.sections)
    assert len(page.all("svg")) == len(report.sections) == 7
    ids = {one.get("id") for _, one in page.elements}
    assert {section.name for section in report.sections} < ids
    assert {"table", "departures", "repeat"} < ids


def test_ids_are_unique_and_references_lead_somewhere(page: Page) -> None:
    ids = Counter(str(one["id"]) for _, one in page.elements if "id" in one)
    assert set(ids.values()) == {1}
    links = [
        str(one.get("href"))
        for tag, one in page.elements
        if "href" in one and tag != "image"
    ]
    links += [
        value.split("url(")[1].split(")")[0]
        for _, one in page.elements
        for value in map(str, one.values())
        if "url(" in value
    ]
    assert links
    assert {link.removeprefix("#") for link in links} <= ids.keys()


def test_nothing_is_fetched(html: str, page: Page) -> None:
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert not {"script", "link", "iframe", "object", "img"} & {
        tag for tag, _ in page.elements
    }
    pictures = [str(one["href"]) for one in page.all("image")]
    assert pictures
    assert all(one.startswith("data:image/png;base64,") for one in pictures)
    (policy,) = [one for one in page.all("meta") if "http-equiv" in one]
    assert str(policy["content"]).startswith("default-src 'none'")


def test_every_image_has_an_alternative_text(report: Report, page: Page) -> None:
    told = [one["aria-label"] for one in page.all("svg")]
    assert told == [one.picture.alternative for one in report.sections if one.picture]
    assert all(one["role"] == "img" for one in page.all("svg"))


def test_tables_have_headers(page: Page) -> None:
    assert len(page.all("table")) == len(page.all("caption")) == 3
    assert all(one.get("scope") in ("row", "col") for one in page.all("th"))


def test_names_are_escaped(html: str, page: Page) -> None:
    assert "a<b>" not in html
    assert f"{WEIRD}01" in page.text
    assert "kNN-Per, rate 2" in page.text


def test_colors_follow_the_page(html: str) -> None:
    start = html.index("<main>")
    assert "var(--ink)" in html[start:]
    for color in (INK, *SERIES):
        assert color.light not in html[start:].lower()
        assert f": {color.light};" in html[:start]
        assert f": {color.dark};" in html[:start]


def test_how_to_repeat_it(page: Page) -> None:
    assert "knnper simulate 'a b.yaml'" in page.text
    commands = [
        f"knnper simulate experiment-{setup}.yaml --set run.seed={seed} "
        f"--output runs/again-{setup}-seed-{seed}"
        for setup, seed in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0))
    ]
    assert [page.text.count(command) for command in commands] == [1] * 5
    assert page.text.count("Save this as experiment-2.yaml") == 1
    assert "torch 2.7.0" in page.text


def test_remarks_stand_above_the_table(report: Report, page: Page) -> None:
    (remark,) = report.chapters[0].remarks
    assert remark in page.text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", [], method="fedavg", losses=())
    for name in ("clients.csv", "personalization.jsonl"):
        (path / name).unlink(missing_ok=True)
    page = Page(as_html(report_of([path])))
    assert len(page.all("svg")) == 0
    for sentence in (
        "No run has partition.json",
        "The runs have no rounds",
        "No method",
    ):
        assert sentence in page.text


def test_markdown_says_the_same(report: Report) -> None:
    text = as_markdown_report(report)
    for section in report.sections:
        assert f"## {section.title}" in text
        assert section.picture is not None
        assert markdown_text(section.picture.alternative) in text
        assert section.text in text
    assert "| kNN-Per, rate 1 | " in text
    assert "    knnper simulate 'a b.yaml'\n" in text
    linked = as_markdown_report(report, Path("figures"))
    assert "](<figures/weights.svg>)" in linked
    assert "](<my charts/weights.svg>)" in as_markdown_report(report, Path("my charts"))


def test_markdown_tells_how_to_repeat_it(report: Report, page: Page) -> None:
    text = as_markdown_report(report)
    explained = text[text.index("Accuracies on the") : text.index("## Averages")]
    assert " ".join(explained.split()) in " ".join(page.text.split())
    assert "\n\n## Averages" in text
    assert "| partition.name | iid |" in text
    for one in report.repetitions:
        assert f"save this as `{one.file}`" in text
        assert all(f"\n    {command}\n" in text for command in one.commands)
        assert f"\n{textwrap.indent(one.experiment, '    ')}\n" in text


def test_names_are_no_html_in_markdown(report: Report) -> None:
    assert "a<b>" not in as_markdown_report(report)
    assert 'Run a&lt;b>&amp;"c|01, seed 0' in as_markdown_report(report)


def test_charts_become_files(report: Report, tmp_path: Path) -> None:
    written = write_figures(report.sections, tmp_path / "new" / "figures")
    names = [section.name for section in report.sections]
    assert [path.name for path in written] == [
        f"{name}.{ending}" for name in names for ending in ("svg", "pdf")
    ]
    for path in written:
        start = path.read_bytes()[:5]
        assert start == (b"%PDF-" if path.suffix == ".pdf" else b"<?xml")
    before = {path: path.read_bytes() for path in written}
    write_figures(report.sections, tmp_path / "new" / "figures")
    assert {path: path.read_bytes() for path in written} == before


def test_with_many_setups_the_best_are_drawn(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(n), rate=n, seed=0) for n in range(10)]
    report = report_of(paths)
    weights = next(one for one in report.sections if one.name == "weights")
    assert weights.picture is not None
    assert len(weights.picture.figure.axes) == 8
    assert "At most 8 of the 10 setups are drawn" in weights.text


def test_a_method_keeps_its_colour() -> None:
    few = colors_of(["Ditto", "kNN-Per"])
    many = colors_of(
        ["FedAvg", "kNN-Per", "APFL", "FedRep", "FedBN", "Local", "x", "y"]
    )
    assert few[1] == many[1] == SERIES[0]
    assert len(set(many)) == 8
    late = colors_of([*map(str, range(8)), "kNN-Per"])
    assert len(set(late[:8])) == 8
    assert late[8] == SERIES[0]
    assert len(colors_of(["kNN-Per"] * 20)) == 20


@pytest.mark.parametrize("color", [INK, *SERIES])
def test_colours_can_be_told_from_the_ground(color: object) -> None:
    assert contrast(color.light, "#ffffff") >= 3  # type: ignore[attr-defined]
    assert contrast(color.dark, "#14171c") >= 3  # type: ignore[attr-defined]


def contrast(one: str, other: str) -> float:
    """Return the ratio that WCAG 2 defines."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
