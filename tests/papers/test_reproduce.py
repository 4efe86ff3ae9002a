"""Files of all kinds, what can be wrong with them, and their report."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import knnper.process as machine
import papers.reproduce as single_run
from knnper.errors import ConfigError, FolderTakenError, RunError
from knnper.experiment import Experiment
from knnper.files import JsonLines
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.family import Family
from knnper.simulation.batches.progress import FamilyEvent
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.workbench import Workbench
from papers.__main__ import app
from papers.catalogue import FIGURES, FigureName, read_figure
from papers.collapse import CollapseSettings
from papers.drift import DriftSettings
from papers.durations import TimeRecords
from papers.files import Paragraph, leading_comment, read_files
from papers.memory import PANELS, MemorySettings, PanelName
from papers.report import COMMAND, Made, summary, write_report
from papers.reproduce import Maker, make_run
from tests.papers.small_files import (
    BASE,
    COMPARISON,
    FIGURE,
    SWEEP,
    QuietWatcher,
    experiment,
    without_data,
    write,
)
from tests.simulation.batches.small_sweep import NEIGHBORS, WORKERS, in_this_process
from tests.simulation.reporting.parsed_page import Page

pytestmark = pytest.mark.integration

NAMES = ["weak-and-strong", "lost", "neighbors", "methods", "base", "shift"]
PLAIN_SWEEP = {key: value for key, value in SWEEP.items() if key != "x"}


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
def few_charts() -> Iterator[None]:
    """Draw nothing but the averages in the pages on runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("knnper.simulation.reports.sections._KINDS", ())
        yield


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    with pytest.MonkeyPatch.context() as patch:
        # It is made before each test's own `here`.
        patch.setattr(WORKERS, in_this_process)
        return Reproduced(tmp_path_factory.mktemp("reproduced"))


def test_each_file_is_made_but_the_one_without_data(reproduced: Reproduced) -> None:
    numbered = enumerate(NAMES, start=1)
    watcher, output = reproduced.watcher, reproduced.output
    assert watcher.begun == [(at, len(NAMES), name) for at, name in numbered]
    shown = {one.file.name for one in reproduced.made if one.shown}
    assert shown == {*NAMES} - {"lost"}
    assert all((output / name).is_dir() for name in shown)
    assert "nowhere does not exist; data.root" in watcher.failed["lost"]
    assert [one.file.name for one in reproduced.made if one.failure] == ["lost"]
    # Figures share a training; the other is of the experiment that is a file itself.
    assert len(list((output / "runs").iterdir())) == 1
    assert watcher.num_trained == 2
    manifest = RunFolder(output / "base").manifest()
    (path,) = (one for one in reproduced.paths if one.stem == "base")
    assert manifest["command"] == [*COMMAND, str(path)]


def test_what_is_done_is_not_done_again(reproduced: Reproduced) -> None:
    watcher, again = reproduced.make(skips=True)
    assert (watcher.num_made, watcher.num_trained) == (0, 0)
    (lost,) = [one for one in again if one.shown is None]
    assert lost.failure is None
    assert "nowhere does not exist" in str(lost.missing)
    for old, new in zip(reproduced.made, again, strict=True):
        assert old.time_spent == new.time_spent
        if old.shown and new.shown:
            assert old.shown.tables == new.shown.tables
    assert summary(again).startswith("Of 6: 5 done, 1 left out: its data are not")


def test_the_tables_are_those_of_the_terminal(reproduced: Reproduced) -> None:
    tables = {
        one.file.name: one.shown.tables[0] for one in reproduced.made if one.shown
    }
    assert tables["neighbors"].header[0] == "k"
    assert [row[0] for row in tables["methods"].rows] == ["FedAvg", "kNN-Per"]
    groups = [row[0] for row in tables["weak-and-strong"].rows]
    assert groups == ["weak", "strong", "average"]
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
    own = {f"{name}/report.html" for name in ("neighbors", "methods", "base")}
    assert {f"#file-{name}" for name in NAMES} | own <= set(links)
    for link in links:
        inside = link.removeprefix("#") in ids
        assert inside or (reproduced.output / link).is_file()


def test_the_page_says_all_of_each_file(reproduced: Reproduced) -> None:
    page = Page(reproduced.page)
    assert len(page.all("svg")) == 5
    assert len(page.all("details")) == len(NAMES)
    in_contents_heading_and_file = 3 * len(NAMES)
    titles = page.text.count("The paper's figure, <small>")
    assert titles == in_contents_heading_and_file
    command = f"python -m papers reproduce {reproduced.paths[0]}"
    for told in ("Of 6: 5 done, 1 failed.", "This file failed. ", command, "CPU cores"):
        assert told in page.text
    labels = [str(one["aria-label"]) for one in page.all("svg")]
    assert "Weak and strong clients (Figure 9). The numbers are in the table." in labels
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


def test_seconds_outlive_the_command(reproduced: Reproduced) -> None:
    lines = (reproduced.output / "seconds.jsonl").read_text().splitlines()
    found = {json.loads(line)["name"]: json.loads(line)["seconds"] for line in lines}
    assert found.keys() == {*NAMES} - {"lost"}
    for one in reproduced.made:
        assert one.time_spent.seconds == found.get(one.file.name, 0.0)
        assert one.time_spent.environment["num_cpus"] > 0


def test_two_commands_do_not_share_a_folder(
    reproduced: Reproduced, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Maker(reproduced.output, 1, QuietWatcher())
    monkeypatch.setattr(QuietWatcher, "begins", lambda *_: other.make_all([]))
    with pytest.raises(RunError, match="another process"):
        reproduced.make()


def make(folder: Path, *documents: dict[str, Any]) -> list[Made]:
    paths = [write(folder, document) for document in documents]
    return Maker(folder / "out", 1, QuietWatcher()).make_all(read_files(paths))


def bars(made: Made) -> list[str]:
    """Return what the first chart shows the averages of."""
    assert made.shown is not None, made.failure
    axes = made.shown.charts[0].figure.axes[0]
    return sorted(label.get_text() for label in axes.get_yticklabels())


def test_a_sweep_that_changed_shows_what_it_asks_for(tmp_path: Path) -> None:
    sweep = {**PLAIN_SWEEP, "seeds": [1]}
    (first,) = make(tmp_path, {**sweep, "grid": {NEIGHBORS: [1, 5]}})
    both = ["kNN-Per, num_neighbors 1", "kNN-Per, num_neighbors 5"]
    assert bars(first) == ["FedAvg", *both]
    (second,) = make(tmp_path, {**sweep, "grid": {NEIGHBORS: [5]}})
    assert bars(second) == ["FedAvg", "kNN-Per"]
    page = (tmp_path / "out/neighbors/report.html").read_text()
    assert "num_neighbors 1" not in page
    # Nothing had to be made.
    assert second.time_spent == first.time_spent
    assert len(list((tmp_path / "out/neighbors/runs").iterdir())) == 2


def test_older_code_is_told(tmp_path: Path) -> None:
    make(tmp_path, BASE, FIGURE)
    output = tmp_path / "out"
    (training,) = (output / "runs").iterdir()
    for run in (output / BASE["name"], training):
        (run / "code.txt").write_text("older")
    parts = JsonLines(output / FIGURE["name"] / "parts.jsonl")
    identity, part = parts.read()
    parts.replace([identity, {**part, "code": "older"}])
    told = [one.shown.remarks for one in make(tmp_path, BASE, FIGURE) if one.shown]
    assert f"1 of the runs in {output / 'base'} were made" in " ".join(told[0])
    assert f"1 of the runs in {training} were made" in " ".join(told[1])
    assert "1 of the 1 parts of the figure in" in " ".join(told[1])
    page = (output / BASE["name"] / "report.html").read_text()
    assert "another version of this code" in page

    # As it says.
    shutil.rmtree(output / BASE["name"])
    (anew,) = make(tmp_path, BASE)
    assert anew.shown is not None
    assert anew.shown.remarks == ()
    seconds = JsonLines(output / "seconds.jsonl").read()
    (mine,) = [one["seconds"] for one in seconds if one["name"] == BASE["name"]]
    assert anew.time_spent.seconds == mine


def test_a_fault_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*arguments: object) -> None:
        raise KeyError("lost")

    with monkeypatch.context() as patch:
        patch.setattr("papers.reproduce.run_batch", faulty)
        failed, done = make(tmp_path, SWEEP, BASE)
    place = tmp_path / "out/errors/neighbors.txt"
    assert str(failed.failure).startswith("KeyError: 'lost'")
    assert str(place) in str(failed.failure)
    assert done.failure is None
    text = place.read_text()
    assert text.startswith("Traceback")
    assert 'raise KeyError("lost")' in text

    wrong = {**BASE, "training": {"num_rounds": 3}}
    mended, refused = make(tmp_path, {**SWEEP, "seeds": [1]}, wrong)
    assert mended.failure is None
    assert "holds a run with other settings; delete it" in str(refused.failure)
    # It was mended, and what is expected needs no traceback.
    assert not list(place.parent.iterdir())


def test_runs_that_all_failed_are_told(tmp_path: Path) -> None:
    base = {**BASE, "training": {**BASE["training"], "learning_rate": 1e30}}
    (one,) = make(tmp_path, {**PLAIN_SWEEP, "base": base, "seeds": [1]})
    assert "no run of the file has results: " in str(one.failure)
    assert "failed with seed 1" in str(one.failure)


def invoke(tmp_path: Path, *arguments: object) -> Any:
    command = ["reproduce", *map(str, arguments), "--output", str(tmp_path / "out")]
    return CliRunner().invoke(app, command)


def test_the_command_goes_on_after_a_file_that_fails(tmp_path: Path) -> None:
    files = [without_data(tmp_path), write(tmp_path, SWEEP, seeds=[1])]
    page = tmp_path / "out/report.html"
    done = invoke(tmp_path, *files)
    assert done.exit_code == 1
    for told in (
        "1 of 2  lost (sweep)",
        "2 of 2  neighbors (sweep)",
        "4/4 steps",
        "lost is not done: ",
        "1 of 2 files failed: lost",
    ):
        assert told in done.stderr
    assert f"The report is in {page}" in done.stderr.replace("\n", "")
    assert "This file failed." in page.read_text()

    again = invoke(tmp_path, *files, "--skip-missing-data")
    assert again.exit_code == 0, again.output
    assert "This file was left out." in page.read_text()


def test_nothing_is_made_while_a_file_is_wrong(tmp_path: Path) -> None:
    wrong = write(tmp_path, SWEEP, name="wrong", x="lost")
    done = invoke(tmp_path, write(tmp_path, SWEEP), wrong)
    assert done.exit_code == 2
    assert f"{wrong}: x: found 'lost'" in done.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").touch()
    done = invoke(tmp_path, write(tmp_path, SWEEP))
    assert done.exit_code == 2
    assert "is a file, expected a folder" in done.stderr


@pytest.mark.parametrize("at_once", [False, True])
def test_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    def interrupted(
        families: Sequence[Family], num_workers: int
    ) -> Iterator[Sequence[FamilyEvent]]:
        if not at_once:
            yield next(in_this_process(families, num_workers))
        raise KeyboardInterrupt

    monkeypatch.setattr(WORKERS, interrupted)
    monkeypatch.setattr("sys.argv", ["/x/papers/__main__.py", "reproduce", "a b.yaml"])
    done = invoke(tmp_path, write(tmp_path, SWEEP))
    assert done.exit_code == 130
    assert "To continue: python -m papers reproduce 'a b.yaml'" in done.stderr
    # What was made until then counts.
    records = JsonLines(tmp_path / "out/seconds.jsonl").read()
    assert [one["name"] for one in records] == ([] if at_once else ["neighbors"])
    assert all(one["seconds"] > 0 for one in records)


def test_the_figures_are_those_of_the_catalogue() -> None:
    assert set(get_args(FigureName)) == FIGURES.keys()
    assert get_args(PanelName) == MemorySettings.only == tuple(PANELS)


def test_a_figure_is_read_with_its_experiment(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path, BASE)
    path = write(
        tmp_path / "below",
        {"name": "shift", "figure": "drift", "experiment": "../base.yaml"},
        set={"training.num_rounds": 3},
        options={"steps": 4, "shift_at": 2},
    )
    plan = read_figure(path)
    assert plan.experiment is not None
    assert plan.experiment.training.num_rounds == 3
    assert plan.options == DriftSettings(steps=4, shift_at=2)
    path = write(tmp_path, FIGURE, figure="fedbasis-collapse", options={})
    assert read_figure(path).options == CollapseSettings()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"figure": "memori"}, "figure: found .* did you mean 'memory'"),
        (
            {"options": {"partition": 3}},
            "options.partition: unknown setting; .* 'partitions'",
        ),
        ({"options": {"partitions": 0}}, "options.partitions: found 0, .* at least 1"),
        ({"options": {"only": ["x"]}}, "options.only.0: found .x., expected 'cap"),
        ({"options": {"only": []}}, "options.only: found .*at least 1"),
        ({"figure": "drift", "options": {"steps": 9}}, "shift_at 50 with steps 9"),
        ({"base": None}, "base: expected the sections .* one of the two"),
        ({"experiment": "a.yaml"}, "base: expected the sections .* one of the two"),
        ({"experiment": "a.yaml", "base": None}, "a.yaml: there is no such file"),
        ({"set": {"training.round": 1}}, "training.round: unknown setting"),
        ({"figure": "three-approaches", "options": {}}, "base: found one, .* none"),
        ({"set": {"a.b": 1}, "figure": "three-approaches", "options": {}}, "set: foun"),
        ({"name": "a b"}, "name: found .a b."),
    ],
)
def test_a_wrong_figure(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_figure(write(tmp_path, FIGURE, **changes))


def problems_of(*paths: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_files(paths)
    return str(caught.value)


def test_all_problems_of_all_files_are_told_together(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, SWEEP, x="lost"),
        write(tmp_path, FIGURE, options={"partitions": 0}),
        tmp_path / "none.yaml",
        write(tmp_path, {"name": "strange", "varry": {}}),
    ]
    told = problems_of(*paths)
    for expected in (
        f"{paths[0]}: x: found 'lost', which is not varied",
        f"{paths[1]}: options.partitions: found 0",
        "none.yaml: there is no such file",
        "the keys name, varry, expected a key that only one kind has",
        "sweep: grid or variants or random",
    ):
        assert expected in told


@pytest.mark.parametrize(
    ("text", "found"), [("# nothing\n", "null"), ("2024: x\n", "the keys 2024")]
)
def test_a_file_of_no_kind(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert f"found {found}, expected a key that only one kind has" in problems_of(path)


def test_names_differ(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = write(tmp_path, SWEEP), write(tmp_path / "other", BASE, name="Neighbors")
    assert f"name neighbors: {paths[0]}, {paths[1]} share it" in problems_of(*paths)


@pytest.mark.parametrize("name", ["runs", "report.html", "seconds.jsonl", "Errors"])
def test_names_of_the_reports_own_are_refused(tmp_path: Path, name: str) -> None:
    assert "the report needs it" in problems_of(write(tmp_path, BASE, name=name))


def test_paragraphs_and_listings() -> None:
    text = (
        "# Figure 9,\n# weak and strong clients:\n#\n#   knnper reproduce x.yaml\n"
        "#   knnper report y\n# It ends\n#\n#\n# It departs.\nname: x\n# no\n"
    )
    assert leading_comment(text) == (
        Paragraph("Figure 9, weak and strong clients:", False),
        Paragraph("knnper reproduce x.yaml\nknnper report y", True),
        Paragraph("It ends", False),
        Paragraph("It departs.", False),
    )
    assert leading_comment("name: x\n# late\n") == leading_comment("") == ()


def take(output: Path, seconds: float, *made: str) -> float:
    """Return what is known after a file took so long, in which these were made."""
    records = TimeRecords(output)
    before = records.begin("base")
    for name in made:
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("{}\n")
    records.note("base", seconds, before)
    return records.time_of("base").seconds


def test_the_seconds_of_an_interrupted_file_add_up(tmp_path: Path) -> None:
    # A training counts before the figure has a folder.
    assert take(tmp_path, 1.0, "runs/abc/rounds.jsonl") == 1.0
    assert take(tmp_path, 1.0, "runs/abc/results.json", "base/parts.jsonl") == 2.0
    assert take(tmp_path, 2.0, "base/runs/a/rounds.jsonl") == 4.0
    both = "base/runs/a/results.json", "base/runs/b/failed.txt"
    assert take(tmp_path, 3.0, *both) == 7.0
    # To look at what is there takes no time.
    assert take(tmp_path, 9.0) == take(tmp_path, 9.0, "base/table.md") == 7.0
    shutil.rmtree(tmp_path / "base/runs/b")
    assert take(tmp_path, 3.0, "base/runs/b/results.json") == 10.0
    assert TimeRecords(tmp_path).time_of("other").seconds == 0.0


@pytest.mark.parametrize("deleted", ["base", "base/runs"])
def test_seconds_go_with_what_was_made_in_them(tmp_path: Path, deleted: str) -> None:
    take(tmp_path, 2.0, "base/runs/a/results.json")
    TimeRecords(tmp_path).note("other", 1.0, frozenset({("gone", 0)}))
    shutil.rmtree(tmp_path / deleted)
    assert take(tmp_path, 3.0, "base/runs/a/results.json") == 3.0
    assert TimeRecords(tmp_path).time_of("other").seconds == 1.0


def test_the_environment_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*made: str) -> object:
        take(tmp_path, 1.0, *made)
        return TimeRecords(tmp_path).time_of("base").environment

    for cores in (1, 2):
        found = {"num_cpus": cores}
        monkeypatch.setattr("papers.durations.environment", lambda found=found: found)
        assert taken(*(["base/results.json"] if cores == 1 else [])) == {"num_cpus": 1}
    shutil.rmtree(tmp_path / "base")
    assert taken("base/results.json") == {"num_cpus": 2}


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


def with_threads(threads: int | str) -> Experiment:
    return experiment(run={"engine": "serial", "threads_per_worker": threads})


def interrupt(settings: Experiment, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_run(settings, folder, Observer())


@pytest.mark.parametrize(
    ("cores", "workers"), [((4, 2), (1, 1)), ((4, 4), (1, 2))], ids=["cores", "workers"]
)
def test_a_run_keeps_the_threads_with_which_it_began(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: list[object],
    cores: Sequence[int],
    workers: Sequence[int],
) -> None:
    settings = with_threads("auto")
    for num_cores, num_workers in zip(cores, workers, strict=True):
        monkeypatch.setattr(machine, "usable_cores", lambda found=num_cores: found)
        engine = "serial" if workers == (1, 1) else "flower"
        run = replace(settings.run, engine=engine, num_workers=num_workers)  # type: ignore[arg-type]
        interrupt(replace(settings, run=run), tmp_path / "run")
    assert threads == [4, 4]
    begun = RunFolder(tmp_path / "run").experiment(experiment_catalogue())
    assert begun.run.threads_per_worker == 4


def test_an_edited_number_is_another_run(tmp_path: Path, threads: list[object]) -> None:
    interrupt(with_threads(1), tmp_path / "run")
    with pytest.raises(FolderTakenError, match="holds a run with other settings"):
        make_run(with_threads(2), tmp_path / "run", Observer())
