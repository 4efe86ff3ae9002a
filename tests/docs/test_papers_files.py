"""Every shipped file is read and planned, and the page lists those of the papers."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from knnper.experiment import Experiment
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.family import training_identity
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.experiments import find_experiment
from knnper.simulation.partition.settings import PartitionSettings
from knnper.yaml_text import dump_yaml, parse_yaml, read_yaml
from papers.catalogue import FigurePlan
from papers.files import Plan, leading_comment, read_file, split_title
from tests.docs.plan_files import read_plan_file

Rows = dict[str, list[str]]
Tables = Callable[[str], dict[tuple[str, str], Rows]]
Listings = Callable[[str, str], list[str]]
PLACE = "docs/reproducing.md", ("The papers' files", "")
EXPERIMENTS = Path("papers")
SMALL = EXPERIMENTS / "small"

FILES = sorted(
    [*EXPERIMENTS.rglob("*.yaml"), *Path("simulation/experiments").rglob("*.yaml")]
)

LITTLE = sorted(SMALL.glob("*.yaml"))
ON_CIFAR = "_cifar10"

OF_CIFAR_10 = [
    path
    for path in sorted(EXPERIMENTS.glob("*.yaml"))
    if "experiment: bases/cifar10_paper.yaml" in path.read_text(encoding="utf-8")
]

read = read_plan_file


@pytest.fixture
def rows(tables: Tables) -> Rows:
    page, place = PLACE
    return tables(page)[place]


def full_form(path: Path) -> Path:
    return EXPERIMENTS / f"{path.stem.removesuffix(ON_CIFAR)}.yaml"


def skeleton(plan: Plan) -> object:
    """Return what both forms of a table or figure have in common."""
    if isinstance(plan, Sweep):
        settings = plan.settings
        axes = settings.x, settings.series, settings.y, settings.group
        return axes, settings.grid.keys(), settings.variants.keys()
    if isinstance(plan, Comparison):
        keys = {name: row[0].values.keys() for name, row in plan.variants.items()}
        return plan.reference, keys
    assert isinstance(plan, FigurePlan)
    return plan.figure, getattr(plan.options, "only", None)


def num_trainings(experiments: Iterable[Experiment]) -> int:
    return len({training_identity(experiment) for experiment in experiments})


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_is_valid_without_its_data(path: Path) -> None:
    file = read(path)
    commands = re.findall(
        r"^#   (?:knnper|python -m papers) \w+ (\S+)", file.text, re.MULTILINE
    )
    # What is shipped is called by its name.
    assert {find_experiment(name).resolve() for name in commands} <= {path.resolve()}


@pytest.mark.parametrize("path", [*LITTLE, *map(full_form, LITTLE)], ids=str)
def test_file_has_a_title(path: Path) -> None:
    assert split_title(leading_comment(read(path).text))[0]


@pytest.mark.parametrize("path", LITTLE, ids=str)
def test_small_form_matches_the_full_form(path: Path) -> None:
    small, full = read(path), read(full_form(path))
    assert f"#   python -m papers reproduce {path}\n" in small.text
    assert f"#   python -m papers reproduce {full.path}\n" in full.text
    assert full.name == full.path.stem.replace("_", "-")
    assert skeleton(small.plan) == skeleton(full.plan)


@pytest.mark.parametrize("path", OF_CIFAR_10, ids=str)
def test_documented_change_to_cifar_100_works(
    path: Path, listings: Listings, tmp_path: Path
) -> None:
    page, _ = PLACE
    (changes,) = [
        experiment
        for experiment in listings(page, "yaml")
        if experiment.startswith("set:")
    ]
    document: Any = read_yaml(path)
    sections: Any = parse_yaml(changes, page)
    settings = document.get("set", {})
    unseen = settings.pop("partition.unseen_fraction", None)
    if unseen is None:
        del sections["set"]["partition"]["unseen_fraction"]
    else:
        sections["set"]["partition"]["unseen_fraction"] = unseen
    document["set"] = {**sections["set"], **settings}
    document["experiment"] = str((EXPERIMENTS / document["experiment"]).resolve())
    copy = tmp_path / path.name
    copy.write_text(dump_yaml(document), encoding="utf-8")
    experiment = experiment_of(read_file(copy).plan)
    assert (experiment.data.name, experiment.partition.name) == ("cifar100", "pachinko")
    assert unseen_fraction(experiment) == unseen_fraction(
        experiment_of(read(path).plan)
    )


def experiment_of(plan: Plan) -> Experiment:
    assert isinstance(plan, Sweep | FigurePlan)
    experiment = plan.experiments[0] if isinstance(plan, Sweep) else plan.experiment
    assert experiment is not None
    return experiment


def unseen_fraction(experiment: Experiment) -> float:
    settings = experiment.partition.settings
    assert isinstance(settings, PartitionSettings)
    return settings.unseen_fraction


@pytest.mark.parametrize("path", FILES, ids=str)
def test_figures_of_new_clients_have_unseen_clients(path: Path) -> None:
    plan = read(path).plan
    if isinstance(plan, FigurePlan) and plan.figure in ("memory", "quality"):
        assert unseen_fraction(experiment_of(plan)) > 0


def test_page_lists_every_file(rows: Rows) -> None:
    assert {path.stem.removesuffix(ON_CIFAR) for path in LITTLE} == rows.keys()
    for name, cells in rows.items():
        assert cells[1] == read(EXPERIMENTS / f"{name}.yaml").kind, name
        on_cifar = (SMALL / f"{name}{ON_CIFAR}.yaml").is_file()
        assert ("CIFAR-10" in cells[3]) is on_cifar, name


@pytest.mark.parametrize("folder", [EXPERIMENTS, SMALL])
@pytest.mark.parametrize("together", [("01", "02", "07", "08", "09"), ("04", "11")])
def test_figures_of_one_model_share_a_training(
    folder: Path, together: tuple[str, ...]
) -> None:
    paths = [path for name in together for path in folder.glob(f"fig{name}_*.yaml")]
    little = [path for path in paths if not path.stem.endswith(ON_CIFAR)]
    assert len(little) == len(together)
    assert num_trainings(experiments_of(little)) == 1


def experiments_of(paths: Iterable[Path]) -> list[Experiment]:
    """Return what the figures among the files are drawn of."""
    plans = [read(path).plan for path in paths]
    figures = [plan for plan in plans if isinstance(plan, FigurePlan)]
    return [plan.experiment for plan in figures if plan.experiment is not None]
