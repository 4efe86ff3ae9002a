"""The global model of runs that the serial engine made."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from knnper.errors import RunError
from knnper.simulation.trained_model import trained_model
from knnper.strategies.core.task import ModelPredictor, evaluate
from tests.simulation.finished_run import finished_run

Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Make a finished run of the digits with a tiny model."""

    def make(method: str = "fedavg", seed: int = 3, **model: object) -> Path:
        parent = tmp_path_factory.mktemp("runs")
        return finished_run(parent, method, seed, unseen_fraction=0.0, **model)

    return make


@pytest.fixture(scope="module")
def run(make_run: Runs) -> Path:
    return make_run()


def test_it_is_the_model_that_the_run_evaluated(run: Path) -> None:
    model = trained_model(run)
    name = model.partition.clients[0].name
    test = model.bench.clients.test(name)
    probabilities = model.head(model.embed(test.images))
    expected = ModelPredictor(model.bench.task, model.weights)(test.images)
    torch.testing.assert_close(probabilities, expected, rtol=0, atol=0)
    lines = (run / "personalization.jsonl").read_text().splitlines()
    results = [json.loads(line)["result"] for line in lines]
    reported = next(result for result in results if result["client"] == name)
    found = evaluate(lambda images: probabilities, test)  # type: ignore[arg-type]
    assert found.num_correct == reported["reference"]["num_correct"]


def test_it_knows_the_data(run: Path) -> None:
    model = trained_model(run)
    assert model.spec == model.dataset.spec
    assert model.class_names == model.dataset.class_names
    assert model.embedding_dim == 8
    assert model.experiment.name == "trained"
    assert len(model.partition.clients) == 6
    assert model.embed(model.bench.clients.test("0000").images).shape[1] == 8


def test_the_fingerprint_is_of_weights_model_and_input(
    run: Path, make_run: Runs
) -> None:
    model = trained_model(run)
    assert len(model.fingerprint) == 64
    assert trained_model(run).fingerprint == model.fingerprint
    assert trained_model(make_run()).fingerprint == model.fingerprint
    assert trained_model(make_run(seed=4)).fingerprint != model.fingerprint


@pytest.mark.parametrize("method", ["fedavg_plus", "scaffold", "agnostic", "apfl"])
def test_methods_with_one_model_are_taken(make_run: Runs, method: str) -> None:
    model = trained_model(make_run(method))
    assert model.weights.shape == (model.bench.task.model.num_weights,)


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("local", "Local"),
        ("fedem", "FedEM"),
        ("pfedhn", "pFedHN"),
        ("fed_mtl", "Fed-MTL"),
        ("l2gd", "L2GD"),
    ],
)
def test_others_are_refused(make_run: Runs, method: str, title: str) -> None:
    with pytest.raises(RunError, match=f"{title}, which does not end with one model"):
        trained_model(make_run(method))


def test_the_file_of_first_weights_may_be_gone(make_run: Runs, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    start = trained_model(make_run())
    path = tmp_path / "start.safetensors"
    save_file(start.bench.task.model.named(start.weights), path)
    finished = make_run(weights=str(path))
    path.unlink()
    assert trained_model(finished).fingerprint != start.fingerprint


def damaged(run: Path, what: str) -> None:
    results = run / "results.json"
    if what == "results":
        results.unlink()
    elif what == "checkpoints":
        (run / "checkpoints").rename(run / "elsewhere")
    elif what == "split":
        document = json.loads(results.read_text())
        document["manifest"]["partition_hash"] = "0" * 64
        results.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("results", r"the run is not done; go on with it"),
        ("checkpoints", r"checkpoint of round 2 .* found none"),
        ("split", "expected the split 000000000000"),
    ],
)
def test_what_a_run_lacks_is_said(make_run: Runs, what: str, message: str) -> None:
    path = make_run()
    damaged(path, what)
    with pytest.raises(RunError, match=message):
        trained_model(path)
    with pytest.raises(RunError, match="holds no run"):
        trained_model(path.parent)
