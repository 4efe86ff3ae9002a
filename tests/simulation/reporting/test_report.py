"""The page: valid, self-contained, told to whoever cannot see it, and escaped."""

import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.simulation.origin import CODE, Inputs, keep_inputs
from knnper.simulation.reports.figure import INK, SERIES
from knnper.simulation.reports.finished_run import load_run
from knnper.simulation.reports.pages import as_html, as_markdown_report
from knnper.simulation.reports.provenance import by_data
from knnper.simulation.reports.report import Report, report_of
from knnper.simulation.reports.sections import write_figures
from knnper.simulation.reports.text import markdown_text
from tests.simulation.reporting.made_runs import made_run
from tests.simulation.reporting.parsed_page import Page

pytestmark = pytest.mark.integration

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
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {section.name for section in report.sections} < ids
    assert {"table", "departures", "repeat"} < ids


def test_ids_are_unique_and_references_lead_somewhere(page: Page) -> None:
    ids = Counter(
        str(attributes["id"]) for _, attributes in page.elements if "id" in attributes
    )
    assert set(ids.values()) == {1}
    links = [
        str(attributes.get("href"))
        for tag, attributes in page.elements
        if "href" in attributes and tag != "image"
    ]
    links += [
        value.split("url(")[1].split(")")[0]
        for _, attributes in page.elements
        for value in map(str, attributes.values())
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
    pictures = [str(attributes["href"]) for attributes in page.all("image")]
    assert pictures
    assert all(address.startswith("data:image/png;base64,") for address in pictures)
    (policy,) = [
        attributes for attributes in page.all("meta") if "http-equiv" in attributes
    ]
    assert str(policy["content"]).startswith("default-src 'none'")


def test_images_have_alternatives_and_tables_headers(
    report: Report, page: Page, html: str
) -> None:
    labels = [attributes["aria-label"] for attributes in page.all("svg")]
    assert labels == [
        section.picture.alternative for section in report.sections if section.picture
    ]
    assert all(attributes["role"] == "img" for attributes in page.all("svg"))
    # Both groups of clients, whom each of three setups serves worst, what departs.
    assert len(page.all("table")) == len(page.all("caption")) == 6
    assert all(
        attributes.get("scope") in ("row", "col") for attributes in page.all("th")
    )
    # Names are escaped.
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


def test_how_to_repeat_it(report: Report, page: Page) -> None:
    assert "knnper simulate 'a b.yaml'" in page.text
    commands = [
        f"knnper simulate experiment-{setup}.yaml --set run.seed={seed} "
        f"--output runs/again-{setup}-seed-{seed}"
        for setup, seed in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0))
    ]
    assert [page.text.count(command) for command in commands] == [1] * 5
    assert page.text.count("Save this as experiment-2.yaml") == 1
    assert "torch 2.7.0" in page.text
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
    for repetition in report.repetitions:
        assert all(f"\n    {command}\n" in text for command in repetition["commands"])
        assert f"\n{textwrap.indent(repetition['experiment'], '    ')}\n" in text
    # Names are no HTML.
    assert "a<b>" not in text
    linked = as_markdown_report(report, Path("figures"))
    assert "](<figures/weights.svg>)" in linked
    assert "](<my charts/weights.svg>)" in as_markdown_report(report, Path("my charts"))


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
    weights = next(section for section in report.sections if section.name == "weights")
    assert weights.picture is not None
    assert len(weights.picture.figure.axes) == 8
    assert "At most 8 of the 10 setups are drawn" in weights.text


# What a report says against itself: above the table, in plain sentences.


def remarks(*paths: Path, with_charts: bool = False) -> tuple[str, ...]:
    (chapter,) = report_of(paths).chapters
    return chapter.remarks + (chapter.remarks_on_charts if with_charts else ())


def test_other_seeds_and_other_splits_are_told(tmp_path: Path) -> None:
    local = made_run(tmp_path / "c", method="local")
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    (remark,) = remarks(*paths, local)
    assert remark.startswith("Not all setups have the same seeds")
    results = local / "results.json"
    results.write_text(results.read_text().replace("split of", "another split of"))
    (remark,) = remarks(paths[0], local)
    assert remark.startswith("Runs with the same seed have different splits")


def test_clients_without_figures_are_told(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run")
    document = json.loads((path / "results.json").read_text())
    # As earlier versions called the step.
    document["hand_over"] = {"withheld": ["a", "b"], "away": ["c"]}
    (path / "results.json").write_text(json.dumps(document))
    (remark,) = remarks(path)
    assert remark.startswith("run: 2 clients withhold their figures, 1 did")


def test_runs_on_validation_data_are_told(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / str(seed), seed=seed, evaluate_on="validation")
        for seed in (0, 1)
    ]
    (remark,) = remarks(*paths)
    assert remark.startswith("These runs were evaluated on validation data")
    report = report_of(paths)
    for text in (as_markdown_report(report), Page(as_html(report)).text):
        assert "Accuracies on the clients' validation splits" in text


def test_test_and_validation_data_are_kept_apart(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / "test")]
    paths.append(made_run(tmp_path / "validation", evaluate_on="validation"))
    report = report_of(paths)
    of_test, of_validation = report.chapters
    assert of_test.remarks == ()
    assert len(of_validation.remarks) == 1
    text = as_markdown_report(report)
    for split in ("test", "validation"):
        assert f"clients' {split} splits" in text


def test_runs_of_other_code_are_told(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in range(4)]
    for path, version in zip(paths, ("old", "new", "new", ""), strict=True):
        (path / CODE).write_text(version)
    (remark,) = remarks(*paths)
    assert "not made by the same code: code.txt has 2 versions in 3 runs" in remark
    assert remarks(*paths[1:]) == ()


@pytest.mark.parametrize(
    "name", ["clients.csv", "rounds.jsonl", "personalization.jsonl"]
)
def test_files_that_are_lacking_are_told(tmp_path: Path, name: str) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    other = made_run(tmp_path / "b", method="fedavg")
    (paths[1] / name).unlink()
    (remark,) = remarks(*paths, with_charts=True)
    assert remark == (
        f"1 of the 2 runs of kNN-Per lack {name} ({paths[1]}): its charts are of the "
        "others."
    )
    # What none has is told in the place of its chart; the table needs no such file.
    (paths[0] / name).unlink()
    assert remarks(*paths, with_charts=True) == ()
    assert remarks(*paths) == ()
    (remark,) = remarks(paths[0], other, with_charts=True)
    assert remark == f"kNN-Per has no {name}: its charts leave it out."


def test_a_run_without_rounds_lacks_none(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / "a"), made_run(tmp_path / "b", method="x", losses=())]
    assert remarks(*paths, with_charts=True) == ()


# Runs over other data sets or partitions never share a table or a chart.


DIGITS = {"name": "digits"}
MIXTURE = {"name": "synthetic_mixture", "num_users": 12}
DIRICHLET = {"name": "dirichlet", "num_clients": 12, "unseen_fraction": 0.25}


def run(
    path: Path,
    data: Mapping[str, Any] = DIGITS,
    partition: Mapping[str, Any] = DIRICHLET,
    content: str = "",
    **settings: Any,
) -> Path:
    """Return a finished run over this data and partition."""
    made_run(path, **settings)
    results = json.loads((path / "results.json").read_text())
    experiment = results["manifest"]["experiment"]
    experiment |= {"data": data, "partition": partition}
    experiment |= {"model": {"name": "tiny_cnn", "embedding_dim": 8}}
    (path / "results.json").write_text(json.dumps(results))
    if content:
        keep_inputs(path, Inputs(content, None))
    return path


def tables(*paths: Path) -> list[list[str]]:
    """Return the names of the runs of each table."""
    return [[run.name for run in runs] for _, runs in by_data([*map(load_run, paths)])]


def test_each_data_set_and_partition_has_a_table(tmp_path: Path) -> None:
    other = {**DIRICHLET, "alpha": 0.1}
    paths = [
        run(tmp_path / "a"),
        run(tmp_path / "b", data=MIXTURE),
        run(tmp_path / "c", partition=other),
        run(tmp_path / "d", seed=1),
        run(tmp_path / "e", method="fedavg"),
    ]
    assert tables(*paths) == [["a", "d", "e"], ["b"], ["c"]]


def test_how_much_unseen_clients_learn_from_is_no_other_data(tmp_path: Path) -> None:
    """They are tested on the same, as a sweep of the capacity does."""
    paths = [
        run(
            tmp_path / str(fraction),
            partition={**DIRICHLET, "unseen_train_fraction": fraction},
        )
        for fraction in (0.5, 1.0)
    ]
    assert tables(*paths) == [["0.5", "1.0"]]
    (part,) = report_of(paths).chapters
    assert "capacity" not in part.over.title
    (half, *_) = report_of(paths[:1]).chapters
    assert "capacity 0.5" in half.over.title
    assert all("unseen_train_fraction" in setup.label for setup in part.setups)


def test_the_same_content_is_the_same_data_wherever_it_is(tmp_path: Path) -> None:
    first, second = ({"name": "cifar10", "root": root} for root in ("here", "there"))
    paths = [
        run(tmp_path / "a", first, content="1" * 64),
        run(tmp_path / "moved", second, content="1" * 64),
        run(tmp_path / "not known", first),
        run(tmp_path / "changed", first, content="2" * 64),
    ]
    assert tables(*paths) == [["a", "moved", "not known"], ["changed"]]
    titles = [over.title for over, _ in by_data([*map(load_run, paths)])]
    assert len(set(titles)) == 2
    assert "1" * 12 in titles[0]


def test_the_top_names_data_partition_model_and_seeds(tmp_path: Path) -> None:
    paths = [run(tmp_path / str(seed), seed=seed) for seed in (3, 5)]
    report = report_of(paths)
    (chapter,) = report.chapters
    assert list(chapter.facts) == ["data set", "partition", "model", "seeds"]
    data, partition, model, seeds = chapter.facts.values()
    assert data == "Digits"
    assert "\N{GREEK SMALL LETTER ALPHA} 0.3" in partition
    assert "9 seen and 3 unseen clients" in partition
    assert "embedding_dim 8" in model
    assert seeds == "3, 5"
    page, text = Page(as_html(report)), as_markdown_report(report)
    for fact in chapter.facts.values():
        assert page.text.index(fact) < page.text.index("Seen clients")
        assert text.index(fact) < text.index("Seen clients")


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [run(tmp_path / "a"), run(tmp_path / "b", data=MIXTURE)]


def test_a_page_keeps_them_apart(two: list[Path], tmp_path: Path) -> None:
    report = report_of(two)
    html = as_html(report)
    page = Page(html)
    (remark,) = report.remarks
    assert remark in page.text
    ids = [
        str(attributes["id"]) for _, attributes in page.elements if "id" in attributes
    ]
    assert len(ids) == len(set(ids))
    first, second = html.split('id="part-2"')
    assert first.count("<caption>Seen clients") == 1
    assert second.count("<caption>Seen clients") == 1
    names = [section.name for section in report.sections]
    assert len(names) == len(set(names)) == 14
    text = as_markdown_report(report)
    for chapter in report.chapters:
        assert f"## {chapter.over.title}" in text
    assert text.count("### Seen clients") == 2


def test_the_command_keeps_them_apart(two: list[Path]) -> None:
    result = CliRunner().invoke(app, ["report", *map(str, two), "--json"])
    rows = json.loads(result.stdout)
    assert {(row["runs"][0], row["data"]) for row in rows} == {
        ("a", "Digits"),
        ("b", "Synthetic mixture (num_users 12)"),
    }
