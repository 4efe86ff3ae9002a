"""What a client keeps and serves after a model is installed, once or again."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.client import install
from knnper.client.install import SiteState, open_served, store_spec
from knnper.client.onboarding import onboard
from knnper.client.settings import read_client
from knnper.client.state import SiteStateError, read_pending
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.data.text import CHARACTER_NAMES
from knnper.datastore.examples import InputLayout, Selection
from knnper.datastore.store import Store, open_store
from knnper.seeding import RandomKey
from knnper.strategies.core.exported_model import ModelError
from tests.client.service.small_service import TEXT, tiny_model
from tests.client.state.small_site import (
    TASK,
    drawn,
    feature_model,
    installed,
    model_folders,
    new_site_state,
    queries,
    simulated,
    site,
    small_model,
    stored_names,
)


@pytest.mark.parametrize(
    "personalization",
    [
        {},
        {"kernel": "squared", "kernel_scale": 0.3, "num_neighbors": 3},
        {"tuning": {"evidence": "leave_one_out", "num_neighbors_grid": [1, 5]}},
        {"knn_weights": [0.4]},
        {"store": {"policy": "reservoir", "capacity": 17, "seed": 3}},
        {"store": {"policy": "fifo", "capacity": 12}},
        {"store": {"index": {"name": "sq8"}}},
    ],
)
@pytest.mark.parametrize("sizes", [(30, 20), (1, 0), (0, 1), (2, 0), (1, 1), (0, 0)])
def test_predictions_are_those_of_the_simulation(
    tmp_path: Path, personalization: dict[str, Any], sizes: tuple[int, int]
) -> None:
    model, data = small_model(**personalization), site(*sizes)
    predictor = simulated(model, data)
    expected = predictor(queries())
    with open_served(installed(tmp_path, model, data), writable=True) as served:
        assert served.store.fingerprint == model.fingerprint
        made = served.predict(queries())
    assert torch.equal(made.probabilities, expected)
    assert made.knn_weight == predictor.effective_knn_weight
    assert torch.equal(made.labels, expected.argmax(dim=1))


def test_one_class_only(tmp_path: Path) -> None:
    examples = drawn("train", 15, num_labels=1)
    data = SiteData(examples, drawn("validation", 5, 1), drawn("test", 3, 1), TASK)
    decided = new_site_state(tmp_path).install(small_model(), data, took_part=False)
    assert decided.serving.accuracy.knn == 1.0
    assert decided.serving.accuracy.measured_on == "test"


def test_the_store_holds_names_and_inputs_in_order(tmp_path: Path) -> None:
    data = site(5, 3)
    site_state = installed(tmp_path, small_model(), data)

    assert stored_names(site_state) == [*data.train.names, *data.validation.names]
    with open_store(site_state.places.store) as store:
        assert store.spec.class_names == TASK.class_names
        ids = store.contents().ids
        both = data.client_data().train_and_validation()
        assert torch.equal(store.inputs(ids), both.images)
        assert store.contents().labels.tolist() == both.labels.tolist()


def test_a_new_model_keeps_all_examples_and_adds_new_ones(tmp_path: Path) -> None:
    first, second = small_model(seed=1), small_model(seed=2, embedding_dim=12)
    site_state = installed(tmp_path, first, site(10, 5))
    arrived = drawn("arrived", 2).examples
    with open_served(site_state, writable=True) as served:
        served.add(arrived.images, arrived.labels, ["arrived/x", None])
        served.delete(Selection(external_ids=("train/3.png",)))
    serving = site_state.install(second, site(13, 5), took_part=False).serving

    kept = [f"train/{n}.png" for n in range(10) if n != 3]
    validation = [f"validation/{n}.png" for n in range(5)]
    later = [f"train/{n}.png" for n in (10, 11, 12)]
    names = stored_names(site_state)
    assert names == [*kept, *validation, "arrived/x", None, *later]
    assert serving.model == second.fingerprint
    found = site_state.served()
    assert found is not None
    assert (found.model, found.previous) == (second.fingerprint, first.fingerprint)
    with open_store(site_state.places.store) as store:
        assert store.fingerprint == second.fingerprint
        ids = store.contents().ids
        expected = second.embed(store.inputs(ids))
        # Embedded in other batches, which shows in the last bits.
        torch.testing.assert_close(store.vectors(ids), expected)


def test_installing_again_changes_nothing(tmp_path: Path) -> None:
    model, data, site_state = small_model(), site(), new_site_state(tmp_path)
    first = site_state.install(model, data, took_part=False).serving
    again = site_state.install(model, data, took_part=False).serving

    assert stored_names(site_state) == [*data.train.names, *data.validation.names]
    assert (again.knn_weight, again.accuracy) == (first.knn_weight, first.accuracy)
    assert (again.expected_gain, again.previous) == (first.expected_gain, None)


def test_an_evicted_example_does_not_come_back(tmp_path: Path) -> None:
    model, data = small_model(store={"policy": "fifo", "capacity": 6}), site(5, 5)
    site_state = new_site_state(tmp_path)
    for _ in range(2):
        site_state.install(model, data, took_part=False)
        kept = [data.train.names[4], *data.validation.names]
        assert stored_names(site_state) == kept


def test_models_that_nothing_names_are_removed(tmp_path: Path) -> None:
    site_state = new_site_state(tmp_path)
    models = [small_model(seed=seed) for seed in range(3)]
    for model in models:
        site_state.install(model, site(4, 2), took_part=False)
    assert model_folders(site_state) == {one.fingerprint for one in models[1:]}


def test_an_empty_memory_takes_a_new_model_and_examples(tmp_path: Path) -> None:
    site_state = installed(tmp_path, small_model(seed=1), site(0, 0))
    second = small_model(seed=2, embedding_dim=5)
    site_state.install(second, site(0, 0), took_part=False)
    with open_served(site_state, writable=True) as served:
        assert served.model.fingerprint == second.fingerprint
        made = served.predict(queries(2))
        assert (made.vote.probabilities, made.vote.num_stored) == (None, 0)
        assert made.vote.names == [[], []]
        one = drawn("one", 1).examples
        served.add(one.images, one.labels)
        assert served.predict(queries(2)).vote.neighbors.ids.shape == (2, 1)


def test_a_memory_for_another_task_is_refused(tmp_path: Path) -> None:
    site_state = installed(tmp_path, small_model(), site(4, 2))
    other = SiteData(
        NamedExamples(drawn("a", 1).examples, ("a",)),
        drawn("validation", 0),
        drawn("test", 0),
        type(TASK)(TASK.spec, ("ant", "bee", "cat", "eel")),
    )
    with pytest.raises(SiteStateError, match=r"cat, eel; the model is for .* cat, dog"):
        site_state.install(small_model(), other, took_part=False)


def test_a_removed_store_is_made_anew(tmp_path: Path) -> None:
    site_state = installed(tmp_path, small_model(), site(4, 2))
    shutil.rmtree(site_state.places.store)
    with open_served(site_state, writable=True) as served:
        assert served.predict(queries(1)).vote.num_stored == 0
    site_state.install(small_model(), site(4, 2), took_part=False)
    assert len(stored_names(site_state)) == 6


def test_nothing_installed_or_a_damaged_record_is_said_so(tmp_path: Path) -> None:
    site_state = new_site_state(tmp_path)
    assert site_state.served() is None
    with pytest.raises(SiteStateError, match="nothing is installed"):
        open_served(site_state, writable=True)
    site_state.places.serving.write_text("{}")
    with pytest.raises(SiteStateError, match=r"serving.json is damaged"):
        site_state.served()


def test_a_model_that_was_tampered_with_is_not_served(tmp_path: Path) -> None:
    model = small_model()
    site_state = installed(tmp_path, model, site(4, 2))
    path = site_state.places.model(model.fingerprint) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="get it again: knnper site onboard"):
        open_served(site_state, writable=True)
    (path.parent / "model.json").write_text("{}")
    site_state.install(model, site(4, 2), took_part=False)
    assert site_state.load(model.fingerprint).fingerprint == model.fingerprint


def test_a_folder_is_one_clients(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    SiteState(folder, "a", "11" * 32)
    SiteState(folder, "a")
    SiteState(folder, "a", "11" * 32)
    with pytest.raises(SiteStateError, match="the state of the client 'a', found the"):
        SiteState(folder, "b", "11" * 32)
    with pytest.raises(SiteStateError, match="with the key 111111111111, found the"):
        SiteState(folder, "a", "22" * 32)
    (folder / "identity.json").write_text("[]")
    with pytest.raises(SiteStateError, match="json is damaged"):
        SiteState(folder, "a")


def test_rows_of_features_are_remembered_as_they_are(tmp_path: Path) -> None:
    model, generator = feature_model(), RandomKey(4).numpy()
    inputs = torch.from_numpy(generator.normal(2, 1, (12, 1, 1, 3)).astype("float32"))
    labels = (inputs[:, 0, 0, 0] > 2).long()
    train = NamedExamples(Examples(inputs, labels), tuple(map(str, range(12))))
    nothing = NamedExamples(Examples(inputs[:0], labels[:0]), ())
    data = SiteData(train, nothing, nothing, model.card.learned)
    with open_served(installed(tmp_path, model, data), writable=True) as served:
        assert torch.equal(served.store.inputs(served.store.contents().ids), inputs)
        made = served.predict(inputs)
        assert made.vote.names[3][0] == "3"


def test_text_is_kept_as_the_ids_of_characters_in_bytes() -> None:
    spec = store_spec(tiny_model(spec=TEXT))
    assert (spec.input, spec.input_bytes) == (InputLayout((1, 1, 6), "uint8"), 6)
    assert spec.class_names == CHARACTER_NAMES


MODEL = small_model()


def part(split: NamedExamples, start: int, end: int) -> NamedExamples:
    examples = split.examples.take(torch.arange(start, end))
    return NamedExamples(examples, split.names[start:end])


def with_test_of(data: SiteData, num_moved: int) -> SiteData:
    """The same site, of whose training examples the last are tested on now."""
    kept, count = len(data.train) - num_moved, len(data.train)
    return dataclasses.replace(
        data, train=part(data.train, 0, kept), test=part(data.train, kept, count)
    )


def test_what_is_tested_on_leaves_the_memory(tmp_path: Path) -> None:
    after, fresh = with_test_of(site(), 12), new_site_state(tmp_path / "fresh")
    site_state = installed(tmp_path / "changed", MODEL, site())
    found = site_state.install(MODEL, after, took_part=False).serving
    expected = fresh.install(MODEL, after, took_part=False).serving
    assert stored_names(site_state) == stored_names(fresh)
    assert not {*stored_names(site_state)} & {*after.test.names}
    assert found.accuracy == expected.accuracy
    assert found.accuracy.num_examples == 12
    assert found.knn_weight == expected.knn_weight
    assert found.expected_gain == expected.expected_gain


def test_it_comes_back_when_it_is_trained_on_again(tmp_path: Path) -> None:
    data = site(6, 2)
    site_state = installed(tmp_path, MODEL, data)
    with open_served(site_state, writable=True) as served:
        served.delete(Selection(external_ids=("train/0.png",)))
    site_state.install(MODEL, with_test_of(data, 2), took_part=False)
    site_state.install(MODEL, data, took_part=False)
    names = stored_names(site_state)
    # What the owner deleted stays away.
    assert set(names) == {*data.train.names[1:], *data.validation.names}


def test_the_service_lets_it_go(tmp_path: Path) -> None:
    data = site(6, 2)
    site_state = installed(tmp_path, MODEL, data)
    with open_served(site_state, writable=True) as served:
        images = data.train.examples.images
        assert served.predict(images).vote.names[5][0] == "train/5.png"
        site_state.install(MODEL, with_test_of(data, 1), took_part=False)
        pending = read_pending(site_state.places)
        assert pending is not None
        assert pending.moved == ("train/5.png",)
        served.refresh()
        made = served.predict(images)
        assert made.vote.num_stored == 7
        assert not any("train/5.png" in row for row in made.vote.names)
    assert read_pending(site_state.places) is None


def test_an_example_of_the_service_counts_as_well(tmp_path: Path) -> None:
    data = site(4, 2)
    site_state = installed(tmp_path, MODEL, data)
    tested = drawn("later", 3)
    with open_served(site_state, writable=True) as served:
        served.add(tested.examples.images, tested.examples.labels, tested.names)
    site_state.install(MODEL, dataclasses.replace(data, test=tested), took_part=False)
    assert stored_names(site_state) == [*data.train.names, *data.validation.names]


@pytest.mark.parametrize(
    ("owner", "step"), [(Store, "delete"), (Store, "reembed"), (install, "embedded")]
)
def test_what_was_cut_short_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, step: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    data = site(6, 3)
    site_state = installed(tmp_path, MODEL, site(6, 2))
    newer = small_model(seed=1)
    with monkeypatch.context() as broken:
        broken.setattr(owner, step, fails)
        with pytest.raises(OSError, match="No space left"):
            site_state.install(newer, with_test_of(data, 2), took_part=False)
    with open_served(site_state, writable=True) as served:
        served.refresh()
        assert served.model.fingerprint == newer.fingerprint
    assert stored_names(site_state) == [*data.train.names[:4], *data.validation.names]


@pytest.mark.parametrize(
    ("train", "said", "assumed"),
    [
        ("true", None, True),
        ("false", None, False),
        ("true", False, False),
        ("false", True, True),
    ],
)
def test_a_site_that_trains_is_taken_as_trained_on(
    tmp_path: Path, train: str, said: bool | None, assumed: bool
) -> None:
    data = site(12, 0)
    images, labels = data.train.examples.images, data.train.examples.labels
    np.savez(tmp_path / "site.npz", inputs=images.numpy(), labels=labels.numpy())
    file = tmp_path / "client.yaml"
    file.write_text(
        f"name: site-a\nserver: nowhere.invalid:1\ninsecure: true\ntrain: {train}\n"
        "data: {name: npz, path: site.npz}\n"
    )
    found = onboard(read_client(file), small_model(), took_part=said)
    assert found.took_part is assumed
    measured_on = found.serving.expected_gain.num_examples
    kept = found.serving.num_train + found.serving.num_validation
    assert measured_on == (found.serving.num_validation if assumed else kept)
