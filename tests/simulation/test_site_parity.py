"""A real client ends with the figures of the simulation's client of its name."""

import json
from pathlib import Path

import pytest

from knnper.client.install import SiteState, open_served
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.simulation.trained_model import TrainedModel, find_model, trained_model
from knnper.strategies.core.exported_model import load_model, save_model
from tests.simulation.finished_run import finished_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs"), "knn_per")


def site_of(model: TrainedModel, client: str) -> SiteData:
    def named(split: str, examples: Examples) -> NamedExamples:
        names = tuple(f"{split}/{number}" for number in range(len(examples)))
        return NamedExamples(examples, names)

    data, test = model.bench.clients.data(client), model.bench.clients.test(client)
    return SiteData(
        named("train", data.train),
        named("validation", data.validation),
        named("test", test),
        model.card.learned,
    )


def test_clients_serve_what_the_simulation_found(run: Path, tmp_path: Path) -> None:
    model = trained_model(run)
    save_model(tmp_path / "model", model)
    exported = load_model(tmp_path / "model")
    lines = (run / "personalization.jsonl").read_text().splitlines()
    results = {one["client"]: one for one in (json.loads(x)["result"] for x in lines)}
    assert len(results) == 6
    for client, result in results.items():
        site_state = SiteState(tmp_path / client, client)
        data = site_of(model, client)
        serving = site_state.install(exported, data, took_part=result["seen"]).serving
        chosen, personal = result["chosen"], result["personal"]
        count = personal["num_examples"]
        assert serving.knn_weight == chosen["knn_weight"]
        assert serving.tuned_on.num_examples == chosen["num_held_out"]
        assert serving.accuracy.mixed == personal["num_correct"] / count
        alone = result["reference"]["num_correct"] / count
        assert serving.accuracy.global_model == alone
        with open_served(site_state, writable=False) as served:
            made = served.predict(data.test.examples.images)
            num_right = int((made.labels == data.test.examples.labels).sum())
            assert num_right == personal["num_correct"]


def test_an_exported_model_needs_no_data(run: Path, tmp_path: Path) -> None:
    model = trained_model(run)
    save_model(run / "model", model)
    # What says how the run went, and its checkpoints, may be gone.
    for name in ("experiment.yaml", "results.json"):
        (run / name).rename(tmp_path / name)
    assert find_model(run).fingerprint == model.fingerprint
    assert find_model(run / "model").card == model.card
