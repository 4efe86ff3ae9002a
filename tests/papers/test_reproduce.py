"""Files of all kinds made to their end, twice, with one that fails among them."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import knnper.process as machine
import papers.reproduce as single_run
from knnper.errors import FolderTakenError, RunError
from knnper.experiment import Experiment
from knnper.files import JsonLines
from knnper.loading import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.family import Family
from knnper.simulation.batches.progress import Advance, Progress, Told
from knnper.simulation.workbench import Workbench, experiment_catalogue
from papers.__main__ import app
from papers.figures import OnPart
from papers.reproduce import (
    COMMAND,
    File,
    Made,
    Maker,
    Paragraph,
    Records,
    duration,
    leading_comment,
    make_run,
    read_files,
    split_title,
    summary,
    write_report,
)
from tests.papers.small_files import (
    BASE,
    COMPARISON,
    FIGURE,
    SWEEP,
    without_data,
    write,
)
from tests.simulation.batches.small_sweep import NEIGHBORS, WORKERS, in_this_process
from tests.simulation.reporting.parsed_page import Page

NAMES = ["weak-and-strong", "lost", "neighbors", "methods", "base", "shift"]


class QuietWatcher:
    """Remembers the files that began, those that failed, and what was made."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, str]] = []
        self.failed: dict[str, str] = {}
        self.num_made = 0
        self.num_trained = 0

    def begins(self, number: int, total: int, file: File) -> None:
        self.begun.append((number, total, file.name))

    def fails(self, file: File, reason: str) -> None:
        self.failed[file.name] = reason

    @contextlib.contextmanager
    def counting(self, total: int, noun: str) -> Iterator[Advance]:
        before = self.num_made

        def advance(progress: Progress) -> None:
            self.num_made = before + progress.done - progress.found

        yield advance

    @contextlib.contextmanager
    def observing(self) -> Iterator[Observer]:
        watcher = self

        class Counting(Observer):
            def training_started(self, num_rounds: int, first_round: int) -> None:
                watcher.num_trained += 1

        yield Counting()

    @contextlib.contextmanager
    def drawing(self, parts: str) -> Iterator[OnPart]:
        first: list[int] = []

        def on_part(done: int, total: int) -> None:
            self.num_made += done - first[-1] if first else 0
            first.append(done)

        yield on_part


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
        self.watcher, self.made = self.make()
        self.page = write_report(self.made, self.output).read_text()

    def make(self, *, skips: bool = False) -> tuple[QuietWatcher, list[Made]]:
        watcher = QuietWatcher()
        maker = Maker(self.output, 1, watcher, skips)
        return watcher, maker.make_all(read_files(self.paths))


@pytest.fixture(autouse=True, scope="module")
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WORKERS, in_this_process)
        yield


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory, here: None) -> Reproduced:
    return Reproduced(tmp_path_factory.mktemp("reproduced"))


def test_each_file_is_told_and_made(reproduced: Reproduced) -> None:
    total = len(NAMES)
    numbered = list(enumerate(NAMES, start=1))
    assert reproduced.watcher.begun == [(at, total, name) for at, name in numbered]
    shown = {one.file.name for one in reproduced.made if one.shown}
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
    assert [one.file.name for one in reproduced.made if one.failure] == ["lost"]


def test_what_is_done_is_not_done_again(reproduced: Reproduced) -> None:
    watcher, again = reproduced.make(skips=True)
    assert (watcher.num_made, watcher.num_trained) == (0, 0)
    (lost,) = [one for one in again if one.shown is None]
    assert lost.failure is None
    assert "is not a folder" in str(lost.missing)
    for old, new in zip(reproduced.made, again, strict=True):
        assert old.making == new.making
        if old.shown and new.shown:
            assert old.shown.tables == new.shown.tables
    assert summary(again).startswith("Of 6: 5 done, 1 left out: its data are not")


def test_the_tables_are_those_of_the_terminal(reproduced: Reproduced) -> None:
    tables = {
        one.file.name: one.shown.tables[0] for one in reproduced.made if one.shown
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
    for one in reproduced.made:
        assert one.making.seconds == found.get(one.file.name, 0.0)
        assert one.making.environment["num_cpus"] > 0


def test_an_experiment_that_changed_wants_another_folder(
    reproduced: Reproduced, tmp_path: Path
) -> None:
    changed = {**BASE, "training": {"num_rounds": 3}}
    maker = Maker(reproduced.output, 1, QuietWatcher())
    (one,) = maker.make_all(read_files([write(tmp_path, changed)]))
    assert "holds a run with other settings; delete it" in str(one.failure)


def test_two_commands_do_not_share_a_folder(
    reproduced: Reproduced, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Maker(reproduced.output, 1, QuietWatcher())

    def busy(self: QuietWatcher, *_: object) -> None:
        other.make_all([])

    monkeypatch.setattr(QuietWatcher, "begins", busy)
    with pytest.raises(RunError, match="another process"):
        reproduced.make()


def test_durations_are_read_by_people() -> None:
    assert [duration(one) for one in (0.4, 59.6, 61.0)] == [
        "0 s",
        "1 min 00 s",
        "1 min 01 s",
    ]


# ``knnper reproduce``: what it tells, how it ends, and how it goes on.


def run(tmp_path: Path, *arguments: object) -> Any:
    command = ["reproduce", *map(str, arguments), "--output", str(tmp_path / "out")]
    return CliRunner().invoke(app, command)


def test_a_failing_file_does_not_stop_the_others(tmp_path: Path) -> None:
    files = [without_data(tmp_path), write(tmp_path, SWEEP, seeds=[1])]
    done = run(tmp_path, *files)
    assert done.exit_code == 1
    assert "1 of 2  lost (sweep)" in done.stderr
    assert "2 of 2  neighbors (sweep)" in done.stderr
    assert "4/4 steps" in done.stderr
    assert "lost is not done: " in done.stderr
    assert "1 of 2 files failed: lost" in done.stderr
    page = tmp_path / "out/report.html"
    assert f"The report is in {page}" in done.stderr.replace("\n", "")
    assert "This file failed." in page.read_text()

    again = run(tmp_path, *files, "--skip-missing-data")
    assert again.exit_code == 0, again.output
    assert "This file was left out." in page.read_text()


def test_nothing_is_made_while_a_file_is_wrong(tmp_path: Path) -> None:
    wrong = write(tmp_path, SWEEP, name="wrong", x="lost")
    done = run(tmp_path, write(tmp_path, SWEEP), wrong)
    assert done.exit_code == 2
    assert f"{wrong}: x: found 'lost'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_interrupted_it_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(
        families: Sequence[Family], num_workers: int
    ) -> Iterator[Sequence[Told]]:
        yield next(in_this_process(families, num_workers))
        raise KeyboardInterrupt

    monkeypatch.setattr(WORKERS, interrupted)
    monkeypatch.setattr("sys.argv", ["/x/papers/__main__.py", "reproduce", "a b.yaml"])
    done = run(tmp_path, write(tmp_path, SWEEP))
    assert done.exit_code == 130
    assert "To go on: python -m papers reproduce 'a b.yaml'" in done.stderr
    # What was made until then counts.
    (record,) = JsonLines(tmp_path / "out/seconds.jsonl").read()
    assert (record["name"], record["seconds"] > 0) == ("neighbors", True)


def test_interrupted_at_once_it_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WORKERS, interrupted)
    assert run(tmp_path, write(tmp_path, SWEEP)).exit_code == 130
    assert not (tmp_path / "out/seconds.jsonl").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    done = run(tmp_path, write(tmp_path, SWEEP))
    assert done.exit_code == 2
    assert "is a file, expected a folder" in done.stderr


# The seconds of files: kept over interruptions, gone with what was made in them.


NAME = "base"


def record(output: Path, seconds: float, *made: str) -> float:
    """Return what is known after a file was made, in which these were made."""
    records = Records(output)
    before = records.begin(NAME)
    for name in made:
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("{}\n")
    records.note(NAME, seconds, before)
    return records.making_of(NAME).seconds


def test_the_seconds_of_an_interrupted_file_add_up(tmp_path: Path) -> None:
    assert record(tmp_path, 2.0, "base/runs/a/rounds.jsonl") == 2.0
    assert record(tmp_path, 3.0, "base/runs/a/results.json") == 5.0
    assert Records(tmp_path).making_of("other").seconds == 0.0


def test_to_look_at_what_is_there_takes_no_time(tmp_path: Path) -> None:
    record(tmp_path, 2.0, "base/results.json")
    assert record(tmp_path, 9.0) == 2.0
    assert record(tmp_path, 9.0, "base/table.md") == 2.0


def test_what_is_deleted_in_part_and_made_anew_counts(tmp_path: Path) -> None:
    record(tmp_path, 2.0, "base/runs/a/results.json", "base/runs/b/failed.txt")
    shutil.rmtree(tmp_path / "base/runs/b")
    assert record(tmp_path, 3.0, "base/runs/b/results.json") == 5.0


@pytest.mark.parametrize("deleted", ["base", "base/runs"])
def test_seconds_go_with_what_was_made_in_them(tmp_path: Path, deleted: str) -> None:
    record(tmp_path, 2.0, "base/runs/a/results.json")
    Records(tmp_path).note("other", 1.0, frozenset({("gone", 0)}))
    shutil.rmtree(tmp_path / deleted)
    assert record(tmp_path, 3.0, "base/runs/a/results.json") == 3.0
    assert Records(tmp_path).making_of("other").seconds == 1.0


def test_the_environment_is_that_of_the_last_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores in (1, 2):
        found = {"num_cpus": cores}
        monkeypatch.setattr("papers.reproduce.environment", lambda found=found: found)
        record(tmp_path, 1.0, *(["base/results.json"] if cores == 1 else []))
    assert Records(tmp_path).making_of(NAME).environment == {"num_cpus": 1}
    shutil.rmtree(tmp_path / NAME)
    record(tmp_path, 1.0, "base/results.json")
    assert Records(tmp_path).making_of(NAME).environment == {"num_cpus": 2}


def test_a_training_counts_before_the_figure_has_a_folder(tmp_path: Path) -> None:
    assert record(tmp_path, 2.0, "runs/abc/rounds.jsonl") == 2.0
    assert record(tmp_path, 3.0, "runs/abc/results.json", "base/parts.jsonl") == 5.0


def test_paragraphs_and_listings() -> None:
    text = (
        "# Figure 9,\n# weak and strong clients:\n#\n#   knnper reproduce x.yaml\n"
        "#   knnper report y\n#\n#\n# It departs.\nname: x # not this\n# nor this\n"
    )
    assert leading_comment(text) == (
        Paragraph("Figure 9, weak and strong clients:", False),
        Paragraph("knnper reproduce x.yaml\nknnper report y", True),
        Paragraph("It departs.", False),
    )
    found = leading_comment("# a\n#   b\n# c\n")
    assert [one.is_listing for one in found] == [False, True, False]
    assert leading_comment("name: x\n# late\n") == ()


@pytest.mark.parametrize(
    ("text", "title", "rest"),
    [
        (
            "# Figure 5 of a.txt, on digits:\n#\n#   play\n",
            "Figure 5 of a.txt, on digits",
            1,
        ),
        ("# Figure 5 of a.txt: by k.\n", "Figure 5 of a.txt: by k", 0),
        ("# One. And another.\n#\n# More.\n", "", 2),
        ("#   a listing\n", "", 1),
        (f"# {'long ' * 30}\n", "", 1),
        ("name: x\n", "", 0),
    ],
)
def test_a_short_first_sentence_is_the_title(text: str, title: str, rest: int) -> None:
    found, paragraphs = split_title(leading_comment(text))
    assert (found, len(paragraphs)) == (title, rest)


# Files that are changed, deleted, made by older code or by faulty code.


PLAIN_SWEEP = {key: value for key, value in SWEEP.items() if key != "x"}


def make_files(folder: Path, *documents: dict[str, Any]) -> list[Made]:
    paths = [write(folder, document) for document in documents]
    return Maker(folder / "out", 1, QuietWatcher()).make_all(read_files(paths))


def bars(made: Made) -> list[str]:
    """Return what the first chart shows the averages of."""
    assert made.shown is not None, made.failure
    axes = made.shown.charts[0].draw().axes[0]
    return [label.get_text() for label in axes.get_yticklabels()]


def test_a_sweep_that_changed_shows_what_it_asks_for(tmp_path: Path) -> None:
    sweep = {**PLAIN_SWEEP, "seeds": [1]}
    (first,) = make_files(tmp_path, {**sweep, "vary": {NEIGHBORS: [1, 5]}})
    both = ["kNN-Per, num_neighbors 1", "kNN-Per, num_neighbors 5"]
    assert sorted(bars(first)) == ["FedAvg", *both]
    (second,) = make_files(tmp_path, {**sweep, "vary": {NEIGHBORS: [5]}})
    assert sorted(bars(second)) == ["FedAvg", "kNN-Per"]
    page = (tmp_path / "out/neighbors/report.html").read_text()
    assert "num_neighbors 1" not in page
    # Nothing had to be made.
    assert second.making == first.making
    assert len(list((tmp_path / "out/neighbors/runs").iterdir())) == 2


def test_a_comparison_that_changed_shows_what_it_asks_for(tmp_path: Path) -> None:
    make_files(tmp_path, COMPARISON)
    method = {"method": {"name": "knn_per"}}
    other = {**method, "personalization": {"num_neighbors": 3}}
    rows = {**COMPARISON["rows"], "memory": other}
    rows["again"] = {**other, "title": "Again"}
    (second,) = make_files(tmp_path, {**COMPARISON, "rows": rows})
    # Two rows have their run in common, and the one before is not among them.
    assert sorted(bars(second)) == ["FedAvg", "kNN-Per"]


def test_older_code_is_told(tmp_path: Path) -> None:
    make_files(tmp_path, BASE, FIGURE)
    output = tmp_path / "out"
    (training,) = (output / "runs").iterdir()
    for run in (output / BASE["name"], training):
        (run / "code.txt").write_text("older")
    parts = JsonLines(output / FIGURE["name"] / "parts.jsonl")
    identity, part = parts.read()
    parts.replace([identity, {**part, "code": "older"}])
    told = []
    for one in make_files(tmp_path, BASE, FIGURE):
        assert one.shown is not None
        told.append(" ".join(one.shown.remarks))
    assert f"1 of the runs in {output / 'base'} were made by another" in told[0]
    assert f"1 of the runs in {training} were made by another version" in told[1]
    assert "1 of the 1 parts of the figure in" in told[1]
    page = (output / BASE["name"] / "report.html").read_text()
    assert "another version of this code" in page

    # As it says.
    shutil.rmtree(output / BASE["name"])
    (anew,) = make_files(tmp_path, BASE)
    assert anew.shown is not None
    assert anew.shown.remarks == ()
    seconds = JsonLines(output / "seconds.jsonl").read()
    (mine,) = [one["seconds"] for one in seconds if one["name"] == BASE["name"]]
    assert anew.making.seconds == mine


def test_faults_of_the_code_do_not_stop_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*arguments: object) -> None:
        raise KeyError("lost")

    with monkeypatch.context() as patch:
        patch.setattr("papers.reproduce.run_batch", faulty)
        failed, done = make_files(tmp_path, SWEEP, BASE)
    place = tmp_path / "out/errors/neighbors.txt"
    assert failed.failure == (
        f"KeyError: 'lost'. Where in the code that was stands in {place}"
    )
    assert done.failure is None
    text = place.read_text()
    assert text.startswith("Traceback")
    assert 'raise KeyError("lost")' in text

    wrong = {**BASE, "training": {"num_rounds": 3}}
    mended, refused = make_files(tmp_path, {**SWEEP, "seeds": [1]}, wrong)
    assert mended.failure is None
    assert "holds a run with other settings" in str(refused.failure)
    # It was mended, and what is expected needs no traceback.
    assert not list(place.parent.iterdir())


def test_runs_that_all_failed_are_told(tmp_path: Path) -> None:
    diverging = {**BASE["training"], "learning_rate": 1e30}
    base = {**BASE, "training": diverging}
    (one,) = make_files(tmp_path, {**PLAIN_SWEEP, "base": base, "seeds": [1]})
    assert "no run of the file has results: " in str(one.failure)
    assert "failed with seed 1" in str(one.failure)


# A run keeps the number of threads that ``auto`` meant when it began.


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows by the threads of each run that is interrupted."""
    found: list[object] = []

    def interrupted(bench: Workbench, *_: Any) -> None:
        found.append(bench.experiment.run.threads_per_worker)
        raise KeyboardInterrupt

    monkeypatch.setattr(single_run, "simulate", interrupted)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    return found


def experiment(threads: int | str) -> Experiment:
    run = {"engine": "serial", "threads_per_worker": threads}
    return load_experiment({**BASE, "run": run}, experiment_catalogue())


def interrupt(settings: Experiment, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_run(settings, folder, Observer())


def test_another_machine_goes_on_with_the_first_ones_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: list[object]
) -> None:
    for cores in (4, 2):
        monkeypatch.setattr(machine, "usable_cores", lambda cores=cores: cores)
        interrupt(experiment("auto"), tmp_path / "run")
    assert threads == [4, 4]
    begun = RunFolder(tmp_path / "run").experiment(experiment_catalogue())
    assert begun.run.threads_per_worker == 4


def test_the_number_of_workers_makes_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: list[object]
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    settings = experiment("auto")
    for num_workers in (1, 2):
        run = replace(settings.run, engine="flower", num_workers=num_workers)
        interrupt(replace(settings, run=run), tmp_path / "run")
    assert threads == [4, 4]


def test_a_number_that_was_edited_is_another_run(
    tmp_path: Path, threads: list[object]
) -> None:
    interrupt(experiment(1), tmp_path / "run")
    with pytest.raises(FolderTakenError, match="holds a run with other settings"):
        make_run(experiment(2), tmp_path / "run", Observer())
