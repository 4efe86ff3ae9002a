"""Runs from Python: what `knnper.simulate` makes, and what `Run` reads of it."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.datastore.local_memory import LocalMemory
from knnper.datastore.prediction import KnnPredictor
from knnper.errors import ConfigError, DataError, FolderTakenError, RunError
from knnper.experiment_file import load_experiment
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.experiments import find_experiment, shipped_experiments
from knnper.simulation.interface import Run, simulate
from knnper.simulation.trained_model import trained_model
from tests.simulation.reporting.parsed_page import Page

SMALL: dict[str, Any] = {
    "partition": {
        "name": "dirichlet",
        "num_clients": 6,
        "alpha": 0.3,
        "unseen_fraction": 0.2,
    },
    "training__num_rounds": 2,
    "training__learning_rate": 0.05,
    "run__engine": "serial",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("interface") / "run"
    return simulate("demo", output=folder, progress=False, **SMALL)


def test_it_is_what_the_command_line_makes(run: Run, tmp_path: Path) -> None:
    split = "{name: dirichlet, num_clients: 6, alpha: 0.3, unseen_fraction: 0.2}"
    changes = [f"partition={split}", "training.num_rounds=2"]
    changes += ["training.learning_rate=0.05", "run.engine=serial"]
    options = [word for change in changes for word in ("--set", change)]
    command = ["simulate", "demo", *options, "--output", str(tmp_path / "run")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for name in ("clients.csv", "experiment.yaml"):
        expected = (tmp_path / "run" / name).read_bytes()
        assert (run.path / name).read_bytes() == expected


@pytest.mark.parametrize("kind", ["a mapping", "an experiment", "a path"])
def test_an_experiment_may_be_given_as(kind: str, run: Run, tmp_path: Path) -> None:
    path = run.path / "experiment.yaml"
    given: Any = path
    if kind != "a path":
        given = run.results["manifest"]["experiment"]
    if kind == "an experiment":
        given = load_experiment(given, experiment_catalogue())
    torch.set_num_threads(2)
    again = simulate(given, output=tmp_path / "run", progress=False, name="again")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert again.experiment.name == "again"
    expected = run.results["training"]["state_sha256"]
    assert again.results["training"]["state_sha256"] == expected


def test_its_tables_are_those_of_the_files(run: Run) -> None:
    clients, results = run.clients, run.results
    assert len(clients) == 6
    assert clients.index.name == "client"
    assert clients["seen"].tolist().count(False) == 1
    seen = clients[clients["seen"]]
    average = np.average(seen["accuracy"], weights=seen["num_test"])
    assert average == pytest.approx(results["seen"]["accuracy_weighted"])
    assert run.rounds.index.tolist() == [1, 2]


def test_it_shows_itself(run: Run, tmp_path: Path) -> None:
    percents = [
        f"{100 * run.results[group]['accuracy_weighted']:.1f} %"
        for group in ("seen", "unseen")
    ]
    assert repr(run) == (
        f"<Run {run.path}: kNN-Per, right for {percents[0]} of the seen clients' "
        f"examples and {percents[1]} of the unseen clients' examples>"
    )
    page = Page(run._repr_html_())
    assert f"kNN-Per is right for {percents[0]} of the seen clients'" in page.text
    assert len(page.all("table")) == 2
    # A folder that cannot be read is shown, too.
    damaged = Path(shutil.copytree(run.path, tmp_path / "<b>"))
    (damaged / "results.json").write_text("{}")
    for shown in (repr(Run(damaged)), Page(Run(damaged)._repr_html_()).text):
        assert "<b>: damaged: " in shown


def test_notebook_shows_a_run_without_matplotlib(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(run._repr_html_())
    assert "kNN-Per, right for" in page.text
    assert "pip install 'knnper[report]'" in page.text


def test_the_model_is_the_global_one(run: Run) -> None:
    client = run.clients.index[0]
    images = run.test(client).images
    model, expected = run.model(), trained_model(run.path)
    assert not model.training
    with torch.no_grad():
        probabilities = torch.softmax(model(run.preprocess(images)), dim=1)
    expected_rows = expected.head(expected.embed(images))
    torch.testing.assert_close(probabilities, expected_rows)


@pytest.fixture(scope="module")
def run_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("rows")
    generator = np.random.default_rng(0)
    wards, kinds = np.repeat(["a", "b", "c"], 20), np.tile(["low", "high"], 30)
    table = pandas.DataFrame(generator.normal(size=(60, 3)), columns=["x", "y", "z"])
    table.assign(ward=wards, kind=kinds).to_csv(folder / "rows.csv", index=False)
    source = {"name": "table", "train": str(folder / "rows.csv")}
    experiment = {
        "name": "rows",
        "data": {**source, "label": "kind", "client": "ward"},
        "partition": {"name": "natural"},
        "model": {"name": "mlp"},
        "method": {"name": "knn_per"},
        "training": {"num_rounds": 1, "learning_rate": 0.05},
        "run": {"engine": "serial"},
    }
    return simulate(experiment, output=folder / "run", progress=False)


def test_columns_of_own_rows_are_found_by_name(run_of_rows: Run) -> None:
    rows = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    table = pandas.DataFrame(rows, columns=["x", "y", "z"])
    others = table.assign(kind="low")[["z", "kind", "x", "y"]]
    expected = torch.tensor(rows, dtype=torch.float32).reshape(2, 1, 1, 3)
    for given in (rows, torch.tensor(rows), table, others, others.convert_dtypes()):
        assert torch.equal(run_of_rows.inputs(given), expected)
    predictor = run_of_rows.predictor("a")
    assert predictor(run_of_rows.inputs(others)).shape == (2, 2)


def test_own_rows_that_do_not_fit_are_refused(run_of_rows: Run) -> None:
    table = pandas.DataFrame([[1.0, 2.0]], columns=["x", "z"])
    with pytest.raises(DataError, match="has no feature 'y'"):
        run_of_rows.inputs(table)
    with pytest.raises(DataError, match="are missing"):
        run_of_rows.inputs(table.assign(y=np.nan))
    with pytest.raises(DataError, match="could not convert string to float"):
        run_of_rows.inputs(table.assign(y="high"))
    with pytest.raises(DataError, match=r"of shape \(1, 2\)"):
        run_of_rows.inputs(table.to_numpy())
    # Predictors take the form of the run's data, and name the method that makes it.
    for given in (table, table.to_numpy(), torch.ones((1, 3))):
        for use in (run_of_rows.predictor("a"), run_of_rows.preprocess):
            with pytest.raises(DataError, match=r"knnper\.Run\.inputs"):
                use(given)


def test_own_images_have_the_size_of_the_runs(run: Run) -> None:
    images = run.test(run.clients.index[0]).images[:2]
    assert torch.equal(run.inputs(images.numpy()[..., 0]), images)
    with pytest.raises(DataError, match="expected uint8 of shape"):
        run.inputs(np.zeros((2, 5, 5), np.uint8))


@pytest.mark.parametrize("trained", ["all", "head"])
def test_each_client_serves_what_it_served_in_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str
) -> None:
    if trained == "head":  # on embeddings; what is served takes the inputs
        monkeypatch.setenv("KNNPER_CACHE", str(tmp_path / "cache"))
        place = tmp_path / "run"
        settings = SMALL | {"model__trained": "head"}
        run = simulate("demo", output=place, progress=False, **settings)
    assert len(run.clients) > 0
    for client, row in run.clients.iterrows():
        predictor, test = run.predictor(str(client)), run.test(str(client))
        assert test.images.shape[1:] == (8, 8, 1)
        prediction = predictor(test.images)
        right = (prediction.argmax(dim=1) == test.labels).double().mean()
        assert float(right) == pytest.approx(row["accuracy"])
        assert predictor.describe()["knn_weight"] == row["knn_weight"]
        assert repr(predictor).startswith("KnnPredictor(knn_weight=")
        assert len(repr(predictor)) < 200  # no weights, no task


def test_predictor_of_a_run_with_metrics_leaves_the_run_as_it_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "scores.py").write_text(
        "def hits(labels, probabilities):\n    return 1.0\n"
    )
    settings = SMALL | {
        "run__metrics": ["macro_f1", "scores:hits"],
        "run__save_predictions": True,
        "own_code": str(tmp_path),
    }
    run = simulate("demo", output=tmp_path / "run", progress=False, **settings)
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    client = str(run.clients.index[0])
    predictor, test = run.predictor(client), run.test(client)
    right = (predictor(test.images).argmax(dim=1) == test.labels).double().mean()
    assert float(right) == pytest.approx(run.clients["accuracy"][client])
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == files


def test_a_local_memory_on_the_model_predicts_as_the_client_does(run: Run) -> None:
    client = max(run.clients.index, key=lambda name: run.clients["num_train"][name])
    predictor, data, test = run.predictor(client), run.data(client), run.test(client)
    assert isinstance(predictor, KnnPredictor)
    settings: Any = run.experiment.personalization.settings
    memory = LocalMemory(run.model(), kernel=settings.kernel, tuning=settings.tuning)
    memory.fit(
        run.preprocess(data.train.images),
        data.train.labels,
        run.preprocess(data.validation.images),
        data.validation.labels,
    )
    assert memory.knn_weight_ == predictor.knn_weight
    probabilities = torch.from_numpy(memory.predict_proba(run.preprocess(test.images)))
    torch.testing.assert_close(probabilities, predictor(test.images), atol=1e-5, rtol=0)


def test_a_run_that_was_cut_short_goes_on(run: Run, tmp_path: Path) -> None:
    short = simulate("demo", output=tmp_path / "run", progress=False, **SMALL)
    for path in ("results.json", "clients.csv", "personalization.jsonl"):
        (short.path / path).unlink()
    assert not short.is_finished
    assert repr(short) == f"<Run {short.path}: not finished, 2 of 2 rounds>"
    assert "not finished" in Page(short._repr_html_()).text
    with pytest.raises(RunError, match="is not done"):
        _ = short.clients
    with pytest.raises(RunError, match="is not done"):
        short.predictor("client-0")
    short.resume(progress=False, run__num_workers=1)
    assert (short.path / "clients.csv").read_bytes() == (
        run.path / "clients.csv"
    ).read_bytes()
    with pytest.raises(ConfigError, match="makes it another experiment"):
        short.resume(progress=False, run__seed=7)


def test_problem_is_reported(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FolderTakenError, match="holds a run already"):
        simulate("demo", output=run.path, **SMALL)
    with pytest.raises(ConfigError, match="did you mean 'num_rounds'"):
        simulate("demo", output=tmp_path / "run", training__num_round=1)
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        simulate("demoo", output=tmp_path / "run")
    with pytest.raises(RunError, match="holds no run"):
        Run(tmp_path)
    for ask in (run.predictor, run.data, run.test):
        with pytest.raises(RunError, match=r"no client '003', .*did you mean '0003'\?"):
            ask("003")
    with pytest.raises(RunError, match=r"the 6 that .* lists; the first is '0000'"):
        run.predictor("nobody")
    assert not (tmp_path / "run").exists()


def test_progress_is_written_where_nothing_can_be_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    simulate("demo", output=tmp_path / "run", **SMALL)
    captured = capfd.readouterr()
    assert "training: rounds 1 to 2" in captured.err
    assert captured.out == ""


def test_names_of_what_is_shipped_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_experiment("demo") == shipped_experiments()["demo"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert find_experiment("demo") == shipped_experiments()["demo"]
    # A file of one's own goes first, and one in a folder as `knnper init` makes it.
    (tmp_path / "demo/experiment.yaml").write_text("")
    assert find_experiment("demo") == Path("demo/experiment.yaml")
    (tmp_path / "cifar10").write_text("")
    for path in ("cifar10", "demo/experiment.yaml", "elsewhere/demo", "demo.yaml"):
        assert find_experiment(path) == Path(path)
