"""The kinds of files and what can be wrong with them; what is kept of each."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import knnper.process as machine
import papers.reproduce as single_run
from knnper.errors import ConfigError, FolderTakenError
from knnper.experiment import Experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.plan import Comparison, Sweep
from knnper.simulation.workbench import Workbench, experiment_catalogue
from papers.catalogue import FIGURES, FigureName, FigurePlan, read_figure
from papers.collapse import CollapseSettings
from papers.drift import DriftSettings
from papers.memory import PANELS, MemorySettings, PanelName
from papers.reproduce import (
    Paragraph,
    Records,
    leading_comment,
    make_run,
    read_file,
    read_files,
    split_title,
)
from tests.papers.small_files import BASE, COMPARISON, FIGURE, SWEEP, experiment, write


@pytest.mark.parametrize(
    ("document", "kind", "plan"),
    [
        (BASE, "experiment", Experiment),
        (SWEEP, "sweep", Sweep),
        (COMPARISON, "comparison", Comparison),
        (FIGURE, "figure", FigurePlan),
    ],
)
def test_kinds(tmp_path: Path, document: Any, kind: str, plan: type) -> None:
    found = read_file(write(tmp_path, document))
    assert (found.kind, found.name) == (kind, document["name"])
    assert isinstance(found.plan, plan)
    assert leading_comment(found.text)[0].text == "The paper's figure, <small>."


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
        ({"options": {"deal": 3}}, "options.deal: unknown setting; .* 'deals'"),
        ({"options": {"deals": 0}}, "options.deals: found 0, .* at least 1"),
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
        write(tmp_path, FIGURE, options={"deals": 0}),
        tmp_path / "none.yaml",
        write(tmp_path, {"name": "strange", "varry": {}}),
    ]
    told = problems_of(*paths)
    for expected in (
        f"{paths[0]}: x: found 'lost', which is not varied",
        f"{paths[1]}: options.deals: found 0",
        "none.yaml: there is no such file",
        "the keys name, varry, expected a key that tells its kind",
        "sweep: vary or variants or random",
    ):
        assert expected in told


@pytest.mark.parametrize(
    ("text", "found"), [("# nothing\n", "null"), ("2024: x\n", "the keys 2024")]
)
def test_a_file_of_no_kind(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert f"found {found}, expected a key that tells its kind" in problems_of(path)


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


@pytest.mark.parametrize(
    ("text", "title", "rest"),
    [
        ("# Figure 5 of a.txt, on x:\n#\n#   play\n", "Figure 5 of a.txt, on x", 1),
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


def take(output: Path, seconds: float, *made: str) -> float:
    """Return what is known after a file took so long, in which these were made."""
    records = Records(output)
    before = records.begin("base")
    for name in made:
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("{}\n")
    records.note("base", seconds, before)
    return records.making_of("base").seconds


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
    assert Records(tmp_path).making_of("other").seconds == 0.0


@pytest.mark.parametrize("deleted", ["base", "base/runs"])
def test_seconds_go_with_what_was_made_in_them(tmp_path: Path, deleted: str) -> None:
    take(tmp_path, 2.0, "base/runs/a/results.json")
    Records(tmp_path).note("other", 1.0, frozenset({("gone", 0)}))
    shutil.rmtree(tmp_path / deleted)
    assert take(tmp_path, 3.0, "base/runs/a/results.json") == 3.0
    assert Records(tmp_path).making_of("other").seconds == 1.0


def test_the_environment_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*made: str) -> object:
        take(tmp_path, 1.0, *made)
        return Records(tmp_path).making_of("base").environment

    for cores in (1, 2):
        found = {"num_cpus": cores}
        monkeypatch.setattr("papers.reproduce.environment", lambda found=found: found)
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
