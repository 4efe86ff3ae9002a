"""Files of all kinds played to their end, twice, with one that fails among them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.server.run_folder import RunFolder
from papers.reproduce import (
    COMMAND,
    Made,
    Maker,
    duration,
    read_files,
    summary,
    write_report,
)
from tests.papers.quiet_watcher import QuietWatcher
from tests.papers.small_files import (
    BASE,
    COMPARISON,
    FIGURE,
    SWEEP,
    without_data,
    write,
)
from tests.simulation.batches.small_sweep import in_this_process
from tests.simulation.reporting.parsed_page import Page

NAMES = ["weak-and-strong", "lost", "neighbors", "methods", "base", "shift"]


class Reproduced:
    """What one command left."""

    def __init__(self, folder: Path) -> None:
        shift = {**FIGURE, "name": "shift", "figure": "drift"}
        self.paths = [
            write(folder, FIGURE),
            without_data(folder),
            write(folder, SWEEP),
            write(folder, COMPARISON),
            write(folder, BASE),
            write(folder, shift, options={"clients": 3, "steps": 4, "shift_at": 2}),
        ]
        self.output = folder / "out"
        self.watcher, self.played = self.play()
        self.page = write_report(self.played, self.output).read_text()

    def play(self, *, skips: bool = False) -> tuple[QuietWatcher, list[Made]]:
        watcher = QuietWatcher()
        player = Maker(self.output, 1, watcher, skips)
        return watcher, player.make_all(read_files(self.paths))


@pytest.fixture(autouse=True, scope="module")
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        place = "knnper.simulation.batches.runner.run_in_workers"
        patch.setattr(place, in_this_process)
        yield


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory, here: None) -> Reproduced:
    return Reproduced(tmp_path_factory.mktemp("reproduced"))


def test_each_file_is_told_and_played(reproduced: Reproduced) -> None:
    total = len(NAMES)
    numbered = list(enumerate(NAMES, start=1))
    assert reproduced.watcher.begun == [(at, total, name) for at, name in numbered]
    shown = {one.file.name for one in reproduced.played if one.shown}
    assert shown == {*NAMES} - {"lost"}
    for name in shown:
        assert (reproduced.output / name).is_dir()


def test_figures_of_one_experiment_share_its_training(reproduced: Reproduced) -> None:
    assert len(list((reproduced.output / "runs").iterdir())) == 1
    # That one, and the experiment that is a file itself.
    assert reproduced.watcher.num_trained == 2


def test_a_file_without_data_fails_with_the_data_sets_words(
    reproduced: Reproduced,
) -> None:
    reason = reproduced.watcher.failed["lost"]
    assert "nowhere/train is not a folder; data.root must hold" in reason
    assert [one.file.name for one in reproduced.played if one.failure] == ["lost"]


def test_what_is_done_is_not_done_again(reproduced: Reproduced) -> None:
    watcher, again = reproduced.play(skips=True)
    assert (watcher.num_made, watcher.num_trained) == (0, 0)
    (lost,) = [one for one in again if one.shown is None]
    assert lost.failure is None
    assert "is not a folder" in str(lost.missing)
    for old, new in zip(reproduced.played, again, strict=True):
        assert old.making == new.making
        if old.shown and new.shown:
            assert old.shown.tables == new.shown.tables
    assert summary(again).startswith("Of 6: 5 done, 1 left out: its data are not")


def test_the_tables_are_those_of_the_terminal(reproduced: Reproduced) -> None:
    tables = {
        one.file.name: one.shown.tables[0] for one in reproduced.played if one.shown
    }
    assert tables["neighbors"].header[0] == "k"
    assert [row[0] for row in tables["methods"].rows] == ["FedAvg", "kNN-Per"]
    assert [row[0] for row in tables["weak-and-strong"].rows] == [
        "weak",
        "strong",
        "average",
    ]
    assert "seen" in " ".join(tables["base"].rows[0])
    header, *_ = (reproduced.output / "neighbors/table.md").read_text().splitlines()
    assert header == tables["neighbors"].as_markdown().splitlines()[0]


def test_the_page_is_whole_and_fetches_nothing(reproduced: Reproduced) -> None:
    page = Page(reproduced.page)
    assert "http:" not in reproduced.page
    assert "https:" not in reproduced.page
    tags = {tag for tag, _ in page.elements}
    assert not {"script", "link", "iframe", "object", "img"} & tags
    ids = [str(one["id"]) for _, one in page.elements if "id" in one]
    assert len(ids) == len(set(ids))
    links = [str(one["href"]) for one in page.all("a")]
    assert {f"#file-{name}" for name in NAMES} < set(links)
    for link in links:
        inside = link.removeprefix("#") in ids
        assert inside or (reproduced.output / link).is_file()
    own = {"neighbors/report.html", "methods/report.html", "base/report.html"}
    assert own < set(links)


def test_the_page_says_all_of_each_file(reproduced: Reproduced) -> None:
    page = Page(reproduced.page)
    assert len(page.all("svg")) == 5
    assert len(page.all("details")) == len(NAMES)
    in_contents_heading_and_file = 3 * len(NAMES)
    assert (
        page.text.count("The paper's figure, <small>") == in_contents_heading_and_file
    )
    assert "Of 6: 5 done, 1 failed." in page.text
    assert "This file failed. " in page.text
    assert f"python -m papers reproduce {reproduced.paths[0]}" in page.text
    assert "CPU cores" in page.text
    told = [str(one["aria-label"]) for one in page.all("svg")]
    assert "Weak and strong clients (Figure 9). The numbers are in the table." in told
    # A page that turns dark has no fixed black or white left in its pictures.
    main = reproduced.page[reproduced.page.index("<main>") :].lower()
    assert not any(color in main for color in ("#ffffff", "#000000", "#1d2430"))


def test_markdown_links_the_pictures(reproduced: Reproduced) -> None:
    text = (reproduced.output / "report.md").read_text()
    for file in ("weak-and-strong/hardware.svg", "neighbors/plot.svg"):
        assert f"]({file})" in text
        assert (reproduced.output / file).is_file()
    assert "| lost | The paper's figure, &lt;small> | sweep | failed | 0 s |" in text
    assert text.count("\n## The paper's figure, &lt;small>\n") == len(NAMES)
    assert "    knnper reproduce it.yaml\n" in text


def test_a_run_knows_the_command_that_makes_it(reproduced: Reproduced) -> None:
    (path,) = (one for one in reproduced.paths if one.stem == "base")
    manifest = RunFolder(reproduced.output / "base").manifest()
    assert manifest["command"] == [*COMMAND, str(path)]


def test_seconds_outlive_the_command(reproduced: Reproduced) -> None:
    lines = (reproduced.output / "seconds.jsonl").read_text().splitlines()
    found = {json.loads(line)["name"]: json.loads(line)["seconds"] for line in lines}
    assert found.keys() == {*NAMES} - {"lost"}
    for one in reproduced.played:
        assert one.making.seconds == found.get(one.file.name, 0.0)
        assert one.making.environment["num_cpus"] > 0


def test_an_experiment_that_changed_wants_another_folder(
    reproduced: Reproduced, tmp_path: Path
) -> None:
    changed = {**BASE, "training": {"num_rounds": 3}}
    player = Maker(reproduced.output, 1, QuietWatcher())
    (one,) = player.make_all(read_files([write(tmp_path, changed)]))
    assert "holds a run with other settings; delete it" in str(one.failure)


def test_two_commands_do_not_share_a_folder(
    reproduced: Reproduced, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Maker(reproduced.output, 1, QuietWatcher())

    def busy(self: QuietWatcher, *_: object) -> None:
        other.make_all([])

    monkeypatch.setattr(QuietWatcher, "begins", busy)
    with pytest.raises(RunError, match="another process"):
        reproduced.play()


def test_durations_are_read_by_people() -> None:
    assert [duration(one) for one in (0.4, 59.6, 61.0)] == [
        "0 s",
        "1 min 00 s",
        "1 min 01 s",
    ]
