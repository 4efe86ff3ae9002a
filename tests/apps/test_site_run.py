"""A whole run over sites, with the real server and the real clients, in one process."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from knnper.cli.flower_apps import Order, lead_sites
from knnper.client import install
from knnper.client.site import _SiteSource
from knnper.client.site_state import SiteState
from knnper.client.state import Accuracy, Gain
from knnper.data.examples import Examples
from knnper.datastore.prediction import KnnPredictor, Prediction
from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.experiment_file import results_identity
from knnper.networks import TinyCnn
from knnper.predictions import FILE
from knnper.server import late_clients
from knnper.server.observer import Observer, RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import over_sites
from knnper.simulation.trained_model import find_model
from knnper.simulation.workbench import open_workbench
from knnper.strategies.core import evaluation
from tests.apps.site_grid import SiteGrid, experiment, simulated
from tests.simulation.knnper_process import validations

parquet: Any = pytest.importorskip("pyarrow.parquet")
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("inside_a_run")]
SEEN = ("0000", "0001", "0003")


def lead(
    grid: SiteGrid, settings: Experiment, output: Path, observer: Any = None
) -> RunFolder:
    made = Order(over_sites(settings), output, False, output.exists(), None)
    return lead_sites(grid, made, observer or Observer())  # type: ignore[arg-type]


def three(files: dict[str, Path]) -> SiteGrid:
    return SiteGrid({10 + place: files[name] for place, name in enumerate(SEEN)})


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return simulated(tmp_path_factory.mktemp("serial") / "run", experiment())


def rows(folder: RunFolder) -> dict[str, dict[str, str]]:
    with (folder.path / "clients.csv").open() as file:
        return {row["client"]: row for row in csv.DictReader(file)}


def weights_of(folder: RunFolder) -> str:
    digest: str = folder.results()["training"]["state_sha256"]
    return digest


def serving(file: Path, name: str) -> Any:
    found = SiteState(file.parent / f"state-{name}", name).served()
    assert found is not None
    return found


def predicted(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(folder / FILE).to_pylist()
    # A site has names of its own for what the simulation has by index.
    return [{key: row[key] for key in row if key != "example"} for row in rows]


def test_figures_are_those_of_the_simulation_and_of_what_is_served(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, on any processor: here rows depend on their batch, and much."""
    embed = TinyCnn.embed

    def by_batch(model: TinyCnn, x: Tensor) -> Tensor:
        return embed(model, x) * (1 + len(x) % 7 / 10)

    monkeypatch.setattr(TinyCnn, "embed", by_batch)
    settings = experiment(**{"run.save_predictions": "true"})
    ran = lead(three(files), settings, tmp_path / "run")
    expected = simulated(tmp_path / "serial", settings)
    assert weights_of(ran) == weights_of(expected)
    assert rows(ran) == {name: rows(expected)[name] for name in SEEN}
    whole = predicted(expected.path)
    for name, file in files.items():
        if name in SEEN:
            (folder,) = (file.parent / f"state-{name}" / "runs").iterdir()
            own = predicted(folder)
            assert own
            assert own == [one for one in whole if one["client"] == name]
    assert not (ran.path / FILE).exists(), "what a site predicts stays there"
    model = find_model(ran.path / "model")
    for name, row in rows(ran).items():
        served = serving(files[name], name)
        assert served.model == model.fingerprint
        assert served.knn_weight == float(row["knn_weight"])
        assert served.accuracy.mixed == float(row["accuracy"])
    assert validations(ran.path) == validations(expected.path)
    assert None not in validations(ran.path)


def test_who_comes_late_gets_the_model_as_an_unseen_client(
    tmp_path: Path,
    files: dict[str, Path],
    serial: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_clients, "LATE_CHECK_EVERY_S", 0.05)
    grid = three(files)
    first = lead(grid, experiment(), tmp_path / "run")
    weights = weights_of(first)
    grid.join(99, files["0002"])
    settings = experiment(**{"run.federation.stay_s": 1.0})
    again = lead(grid, settings, tmp_path / "run")
    assert rows(again)["0002"] == {**rows(again)["0002"], "seen": "false"}
    expected = rows(serial)["0002"]
    assert rows(again)["0002"]["accuracy"] == expected["accuracy"]
    assert weights_of(again) == weights
    assert serving(files["0002"], "0002").num_train == int(expected["num_train"])
    asked_twice = [one for one in grid.answered if one[1] == "evaluate.personalize"]
    assert len(asked_twice) == 4, "who has the model is not asked again"


def test_who_was_away_in_the_distribution_gets_the_model_later(
    tmp_path: Path,
    files: dict[str, Path],
    serial: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_clients, "LATE_CHECK_EVERY_S", 0.05)
    grid = three(files)

    class GoneAfterTraining(Observer):
        def round_finished(self, record: RoundRecord) -> None:
            if record["server_round"] == 2:
                grid.nodes.discard(11)

    settings = experiment(**{"run.federation.stay_s": 1.0})
    ran = lead(grid, experiment(), tmp_path / "run", GoneAfterTraining())
    assert ran.results()["model_distribution"]["offline"] == ["0001"]
    assert sorted(rows(ran)) == ["0000", "0003"]
    grid.nodes.add(11)
    again = lead(grid, settings, tmp_path / "run")
    assert again.results()["model_distribution"]["offline"] == []
    assert rows(again)["0001"]["accuracy"] == rows(serial)["0001"]["accuracy"]
    assert rows(again)["0001"]["seen"] == "true"


@pytest.mark.parametrize("when", ["round_finished", "personalization_started"])
def test_an_interrupted_run_ends_with_the_same_weights(
    tmp_path: Path, files: dict[str, Path], serial: RunFolder, when: str
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    observer = Observer()
    setattr(observer, when, killed)
    grid = three(files)
    with pytest.raises(KeyboardInterrupt):
        lead(grid, experiment(), tmp_path / "run", observer)
    resumed = lead(grid, experiment(), tmp_path / "run")
    assert weights_of(resumed) == weights_of(serial)
    assert sorted(rows(resumed)) == list(SEEN), "nobody stays to hand it over later"


def test_sites_go_back_with_the_server_to_an_older_round(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    """Those of a method whose clients keep a state, which lies with them."""
    changes = {"method.name": "ditto", "personalization.name": "none"}
    settings = experiment(**changes, **{"training.num_rounds": 3})
    grid = three(files)
    ran = lead(grid, settings, tmp_path / "run")
    trained = [one for one in grid.answered if one[1] == "train"]
    expected = ran.results()["training"]["state_sha256"], rows(ran)
    ran.go_back(1)
    again = lead(grid, settings, tmp_path / "run")
    assert (again.results()["training"]["state_sha256"], rows(again)) == expected
    again_trained = [one for one in grid.answered if one[1] == "train"]
    assert len(again_trained) == len(trained) * 5 // 3


def test_a_site_may_keep_its_figures_to_itself(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    quiet = files["0001"]
    quiet.write_text(quiet.read_text() + "share_metrics: false\n")
    ran = lead(three(files), experiment(), tmp_path / "run")
    assert sorted(rows(ran)) == ["0000", "0003"]
    assert ran.results()["model_distribution"] == {
        "num_clients": 3,
        "withheld": ["0001"],
        "offline": [],
    }
    written = "".join(path.read_text() for path in ran.path.glob("*.jsonl"))
    assert json.dumps({"client": "0001"})[1:-1] in written
    assert serving(quiet, "0001").accuracy.mixed is not None


def test_a_site_may_only_get_the_model(tmp_path: Path, files: dict[str, Path]) -> None:
    idle = files["0001"]
    idle.write_text(idle.read_text() + "train: false\n")
    grid = three(files)
    ran = lead(grid, experiment(), tmp_path / "run")
    assert (11, "train") not in grid.answered
    assert rows(ran)["0001"]["seen"] == "false"


def test_the_server_says_why_a_site_refuses_or_does_not_train(
    tmp_path: Path, files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    pinned = f"experiment: {results_identity(over_sites(experiment()))}"
    for name, limit in (
        ("0000", pinned),
        ("0001", "models: [mlp]"),
        ("0003", "min_examples: 9999"),
    ):
        files[name].write_text(f"{files[name].read_text()}limits: {{{limit}}}\n")
    ran = lead(three(files), experiment(), tmp_path / "run")
    seen = {name: row["seen"] for name, row in rows(ran).items()}
    assert seen == {"0000": "true", "0003": "false"}
    (refused,) = {one for one in caplog.messages if one.startswith("client 0001")}
    why = "found the model tiny_cnn, expected mlp (limits.models)"
    assert why in refused
    assert why in (tmp_path / "state-0001" / "refusals.jsonl").read_text()
    (remark,) = {one for one in caplog.messages if one.startswith("client 0003: ")}
    assert "expected 9999 or more (limits.min_examples)" in remark
    assert serving(files["0003"], "0003").model


@pytest.mark.parametrize("method", ["scaffold", "per_fedavg"])
def test_every_model_that_the_server_announces_is_kept(
    tmp_path: Path, files: dict[str, Path], method: str
) -> None:
    settings = experiment(method=f"{{name: {method}}}", personalization="{}")
    ran = lead(three(files), settings, tmp_path / "run")
    assert weights_of(ran) == weights_of(simulated(tmp_path / "serial", settings))
    model = find_model(ran.path / "model")
    assert [serving(files[name], name).model for name in SEEN] == [
        model.fingerprint
    ] * len(SEEN)


@pytest.mark.parametrize("method", ["local", "l2gd"])
def test_a_method_without_one_model_is_run_and_not_served(
    tmp_path: Path, files: dict[str, Path], method: str
) -> None:
    settings = experiment(method=f"{{name: {method}}}", personalization="{}")
    ran = lead(three(files), settings, tmp_path / "run")
    assert not (ran.path / "model").exists()
    assert not (tmp_path / "state-0000" / "serving.json").exists()
    expected = simulated(tmp_path / "serial", settings)
    assert [one["accuracy"] for one in rows(ran).values()] == [
        rows(expected)[name]["accuracy"] for name in SEEN
    ]


def test_sites_data_cannot_be_simulated() -> None:
    with pytest.raises(RunError, match="knnper fed submit"):
        open_workbench(over_sites(experiment()))


def test_a_choice_that_loses_is_neither_served_nor_reported(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = (Accuracy(), Gain(-0.5, 0.1, 20))
    monkeypatch.setattr(install, "estimate", lambda *_: loss)
    settings = experiment(**{"personalization": "{knn_weights: [0.9]}"})
    ran = lead(three(files), settings, tmp_path / "run")
    assert len(rows(ran)) == 3
    for name, row in rows(ran).items():
        assert serving(files[name], name).tuned_on.overruled
        assert float(row["knn_weight"]) == 0
        assert row["accuracy"] == row["accuracy_global"]


def test_the_report_of_another_method_is_that_methods(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    settings = experiment(method="{name: fedavg}", personalization="{}")
    ran = lead(three(files), settings, tmp_path / "run")
    expected = rows(simulated(tmp_path / "serial", settings))
    assert len(rows(ran)) == 3
    for name, row in rows(ran).items():
        assert row["accuracy"] == expected[name]["accuracy"]
        assert serving(files[name], name).accuracy.knn is not None


def test_a_test_split_is_looked_at_once(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, tests = list[Tensor](), list[Tensor]()
    explain, predict, test_of = (
        KnnPredictor.explain,
        evaluation.predict,
        _SiteSource.test,
    )

    def explaining(predictor: KnnPredictor, images: Tensor) -> Prediction:
        shown.append(images)
        return explain(predictor, images)

    def predicting(predictor: Any, examples: Examples) -> Tensor:
        shown.append(examples.images)
        return predict(predictor, examples)

    def read(source: _SiteSource, client: str) -> Examples:
        tests.append(test_of(source, client).images)
        return test_of(source, client)

    monkeypatch.setattr(KnnPredictor, "explain", explaining)
    monkeypatch.setattr(evaluation, "predict", predicting)
    monkeypatch.setattr(_SiteSource, "test", read)
    lead(three(files), experiment(), tmp_path / "run")
    assert len(tests) == 3
    assert [sum(one is images for images in shown) for one in tests] == [1, 1, 1]
