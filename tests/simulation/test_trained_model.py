"""The global model of runs that the serial engine made."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from knnper.data.site_task import task_of
from knnper.data.task_file import read_task
from knnper.errors import RunError
from knnper.experiment_file import load_experiment
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.trained_model import find_model, model_with, trained_model
from knnper.simulation.workbench import open_workbench
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.exported_model import ModelError, save_model
from tests.simulation.finished_run import finished_run


def test_a_method_without_one_model_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "local")
    with pytest.raises(RunError, match="Local, which does not end with one model"):
        trained_model(run)
    others = {name for name in METHODS if not METHODS[name].ends_with_global_model}
    assert {"fedem", "pfedhn", "fed_mtl", "l2gd"} < others


@pytest.mark.integration
def test_the_file_of_first_weights_may_be_gone(tmp_path: Path) -> None:
    start = trained_model(finished_run(tmp_path / "first"))
    path = tmp_path / "start.safetensors"
    save_file(start.bench.task.model.named(start.weights), path)
    finished = finished_run(tmp_path / "second", weights=str(path))
    path.unlink()
    assert trained_model(finished).fingerprint != start.fingerprint


def test_an_exported_model_needs_no_data(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "knn_per")
    model = trained_model(run)
    save_model(run / "model", model)
    # What says how the run went, and its checkpoints, may be gone.
    for name in ("experiment.yaml", "results.json"):
        (run / name).unlink()
    assert find_model(run).fingerprint == model.fingerprint
    assert find_model(run / "model").card == model.card


def test_an_exported_model_keeps_the_names_of_features(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = "".join(f"{at / 7},{at % 2},{-at}\n" for at in range(20))
    (tmp_path / "rows.csv").write_text(f"pulse,kind,weight\n{rows}")
    document = {
        "name": "rows",
        "data": {"name": "table", "train": str(tmp_path / "rows.csv"), "label": "kind"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "mlp"},
        "method": {"name": "fedavg"},
    }
    bench = open_workbench(load_experiment(document, experiment_catalogue()))
    model = model_with(bench, bench.whole.initial_weights)
    save_model(tmp_path / "model", model)
    for path in (tmp_path / "model", tmp_path / "model" / "model.json"):
        card = find_model(path).card
        assert card.feature_names == ("pulse", "weight")
        assert read_task(path) == card.learned == task_of(bench.dataset)
    # Earlier versions did not write them.
    card = replace(model.card, feature_names=())
    unnamed = replace(model, card=card)
    assert unnamed.fingerprint == model.fingerprint
    save_model(tmp_path / "unnamed", unnamed)
    with pytest.raises(ModelError, match="other names of classes or features"):
        save_model(tmp_path / "unnamed", model)


def test_what_a_run_lacks_is_said(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with pytest.raises(RunError, match="holds no run"):
        trained_model(tmp_path)
    results, checkpoints = run / "results.json", run / "checkpoints"
    text, document = results.read_text(), json.loads(results.read_text())
    document["manifest"]["partition_hash"] = "0" * 64
    results.write_text(json.dumps(document))
    with pytest.raises(RunError, match="expected the split 000000000000"):
        trained_model(run)
    results.write_text(text)
    checkpoints.rename(run / "elsewhere")
    with pytest.raises(RunError, match=r"checkpoint of round 2 .* found none"):
        trained_model(run)
    results.unlink()
    with pytest.raises(RunError, match="the run is not done"):
        trained_model(run)
