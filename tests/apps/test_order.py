from pathlib import Path

import pytest

from knnper.cli.flower_apps import order_of
from knnper.errors import ConfigError, RunError
from knnper.experiment_file import to_json
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import over_sites
from tests.apps.site_grid import experiment

DEFAULTS: dict[str, object] = {
    "experiment": "simulation/experiments/demo.yaml",
    "document": "",
    "set": "",
    "output": "",
    "overwrite": False,
    "resume": False,
    "registry": "",
}


def test_an_experiment_of_the_app_is_found_by_its_relative_path() -> None:
    order = order_of({**DEFAULTS, "set": "run.seed=7;training.num_rounds=3"})
    assert order.experiment.name == "demo"
    assert (order.experiment.run.seed, order.experiment.training.num_rounds) == (7, 3)
    assert order.output == Path("runs/demo").resolve()
    assert order.registry is None


def test_changes_may_be_a_list_whose_values_hold_anything() -> None:
    order = order_of({**DEFAULTS, "set": '["run.seed=7", "name=a", "run.seed=8"]'})
    assert (order.experiment.run.seed, order.experiment.name) == (8, "a")
    with pytest.raises(ConfigError, match=r"found '\[1'"):
        order_of({**DEFAULTS, "set": "[1"})
    with pytest.raises(ConfigError, match=r"found '\[1\]'"):
        order_of({**DEFAULTS, "set": "[1]"})


def test_an_experiment_may_come_with_the_order(tmp_path: Path) -> None:
    settings = over_sites(experiment())
    registry = tmp_path / "roster.json"
    order = order_of(
        {
            **DEFAULTS,
            "document": to_json(settings),
            "set": "run.federation.stay_s=9",
            "registry": str(registry),
        }
    )
    assert order.experiment.data == settings.data
    assert order.experiment.run.federation.stay_s == 9
    assert order.registry == registry


def test_a_run_is_taken_up_with_the_experiment_it_has(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", experiment())
    again = {**DEFAULTS, "resume": True, "output": str(tmp_path / "run")}
    order = order_of({**again, "set": "run.federation.stay_s=9"})
    order.require_free()
    assert order.experiment.name == "four"
    assert order.folder().path == tmp_path / "run"
    with pytest.raises(ConfigError, match="makes it another experiment"):
        order_of({**again, "set": "run.seed=9"})


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", experiment())
    taken = {**DEFAULTS, "output": str(tmp_path / "run")}
    with pytest.raises(RunError, match="holds a run already"):
        order_of(taken).require_free()
    order_of({**taken, "overwrite": True}).require_free()
    with pytest.raises(RunError, match="holds no run"):
        order_of({**DEFAULTS, "resume": True, "output": str(tmp_path)})
