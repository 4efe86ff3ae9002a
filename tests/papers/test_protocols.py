"""The kinds of files, told by their keys, and all that can be wrong with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from knnper.errors import ConfigError
from knnper.experiment import Experiment
from knnper.simulation.batches.plan import Comparison, Sweep
from papers.catalogue import FIGURES, FigureName, FigurePlan, read_figure
from papers.collapse import CollapseSettings
from papers.drift import DriftSettings
from papers.memory import PANELS, MemorySettings, PanelName
from papers.reproduce import leading_comment, read_file, read_files
from tests.papers.small_files import (
    BASE,
    COMPARISON,
    FIGURE,
    SWEEP,
    write,
)


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


def test_a_collapse_has_no_options(tmp_path: Path) -> None:
    plan = read_figure(write(tmp_path, FIGURE, figure="fedbasis-collapse", options={}))
    assert plan.options == CollapseSettings()


def problems_of(paths: Sequence[Path]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_files(paths)
    return str(caught.value)


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
        ({"experiment": "a.yaml", "base": None}, r"a\.yaml: there is no such file"),
        ({"set": {"training.round": 1}}, "training.round: unknown setting"),
        ({"figure": "three-approaches", "options": {}}, "base: found one, .* none"),
        ({"set": {"a.b": 1}, "figure": "three-approaches", "options": {}}, "set: foun"),
        ({"name": "a b"}, "name: found .a b."),
    ],
)
def test_what_is_wrong_with_a_figure_is_said(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_figure(write(tmp_path, FIGURE, **changes))


def test_all_problems_of_all_files_are_told_together(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, SWEEP, x="lost"),
        write(tmp_path, FIGURE, options={"deals": 0}),
        tmp_path / "none.yaml",
        write(tmp_path, {"name": "strange", "varry": {}}),
    ]
    told = problems_of(paths)
    assert f"{paths[0]}: x: found 'lost', which is not varied" in told
    assert f"{paths[1]}: options.deals: found 0" in told
    assert "none.yaml: there is no such file" in told
    assert "the keys name, varry, expected a key that tells its kind" in told
    assert "sweep: vary or variants or random" in told


@pytest.mark.parametrize(
    ("text", "found"), [("# nothing\n", "null"), ("2024: x\n", "the keys 2024")]
)
def test_files_of_no_kind(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert f"{found}, expected a key that tells its kind" in problems_of([path])


def test_names_differ(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    paths = [write(tmp_path, SWEEP), write(other, BASE, name="Neighbors")]
    told = problems_of(paths)
    assert "name neighbors: " in told
    assert f"{paths[0]}, {paths[1]} share it, expected a name for each" in told


@pytest.mark.parametrize("name", ["runs", "report.html", "seconds.jsonl", "Errors"])
def test_names_of_the_reports_own_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, BASE, name=name)
    assert "expected another name: the report needs it" in problems_of([path])
