"""What a client keeps and serves after a model is installed, once or again."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.client import install
from knnper.client.expected_gain import estimate, paired_gain
from knnper.client.install import store_spec
from knnper.client.onboarding import onboard
from knnper.client.served_model import open_served
from knnper.client.settings import read_client
from knnper.client.site_state import SiteState
from knnper.client.state import Accuracy, Gain, SiteStateError, read_pending
from knnper.data.characters import CHARACTER_NAMES
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import InputLayout, NewExamples, Selection, StoreSpec
from knnper.datastore.memory import KnnSettings, TuningSettings
from knnper.datastore.prediction import KERNELS
from knnper.datastore.store import Store, empty_memory_store, memory_store, open_store
from knnper.datastore.tuning import CRITERIA, ParameterGrid, Tuned, fill_and_tune, score
from knnper.seeding import RandomKey
from knnper.strategies.core.evaluation import evaluate
from knnper.strategies.core.exported_model import GlobalModel, ModelError
from tests.client.service.small_service import TEXT, tiny_model
from tests.client.state.small_site import (
    TASK,
    drawn,
    feature_model,
    installed,
    model_folders,
    new_site_state,
    part,
    queries,
    simulated,
    site,
    small_model,
    stored_names,
    with_test_of,
)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"kernel": "squared", "kernel_scale": 0.3, "num_neighbors": 3},
    {"tuning": {"evidence": "leave_one_out", "num_neighbors_grid": [1, 5]}},
    {"knn_weights": [0.4]},
    {"store": {"policy": "reservoir", "capacity": 17, "seed": 3}},
    {"store": {"policy": "fifo", "capacity": 12}},
    {"store": {"index": {"name": "factory", "factory": "SQ8"}}},
]


@pytest.mark.parametrize(
    ("personalization", "sizes"),
    [
        *(({}, sizes) for sizes in ((1, 0), (0, 1), (2, 0), (1, 1), (0, 0))),
        *((one, (30, 20)) for one in SETTINGS),
    ],
)
def test_predictions_are_those_of_the_simulation(
    tmp_path: Path, personalization: dict[str, Any], sizes: tuple[int, int]
) -> None:
    model, data = small_model(**personalization), site(*sizes)
    predictor = simulated(model, data)
    expected = predictor(queries())
    with open_served(installed(tmp_path, model, data)) as served:
        assert served.store.fingerprint == model.fingerprint
        prediction = served.predict(queries())
    assert torch.equal(prediction.probabilities, expected)
    assert prediction.knn_weight == predictor.effective_knn_weight
    assert torch.equal(prediction.labels, expected.argmax(dim=1))


def test_a_new_model_keeps_all_examples_and_adds_new_ones(tmp_path: Path) -> None:
    first, second = small_model(seed=1), small_model(seed=2, embedding_dim=12)
    data = site(13, 5)
    before = dataclasses.replace(data, train=part(data.train, 0, 10))
    site_state = installed(tmp_path, first, before)
    arrived = drawn("arrived", 2).examples
    with open_served(site_state) as served:
        served.add(arrived.images, arrived.labels, ["arrived/x", None])
        served.delete(Selection(external_ids=("train/3.png",)))
    serving = site_state.install(second, data, took_part=False).serving

    kept = [f"train/{n}.png" for n in range(10) if n != 3]
    validation = [f"validation/{n}.png" for n in range(5)]
    later = [f"train/{n}.png" for n in (10, 11, 12)]
    names = stored_names(site_state)
    assert names == [*kept, *validation, "arrived/x", None, *later]
    assert serving.model == second.fingerprint
    served_model = site_state.served()
    assert served_model is not None
    assert (served_model.model, served_model.previous) == (
        second.fingerprint,
        first.fingerprint,
    )
    with open_store(site_state.folder.store) as store:
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
    assert model_folders(site_state) == {model.fingerprint for model in models[1:]}


def test_an_empty_memory_takes_a_new_model_and_examples(tmp_path: Path) -> None:
    site_state = installed(tmp_path, small_model(seed=1), site(0, 0))
    second = small_model(seed=2, embedding_dim=5)
    site_state.install(second, site(0, 0), took_part=False)
    with open_served(site_state) as served:
        assert served.model.fingerprint == second.fingerprint
        prediction = served.predict(queries(2))
        assert (prediction.vote.probabilities, prediction.vote.num_stored) == (None, 0)
        assert prediction.vote.neighbors.names == [[], []]
        example = drawn("one", 1).examples
        served.add(example.images, example.labels)
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


def test_removed_store_is_rebuilt(tmp_path: Path) -> None:
    site_state = installed(tmp_path, small_model(), site(4, 2))
    shutil.rmtree(site_state.folder.store)
    with open_served(site_state) as served:
        assert served.predict(queries(1)).vote.num_stored == 0
    site_state.install(small_model(), site(4, 2), took_part=False)
    assert len(stored_names(site_state)) == 6


def test_missing_or_damaged_record_is_reported(tmp_path: Path) -> None:
    site_state = new_site_state(tmp_path)
    assert site_state.served() is None
    with pytest.raises(SiteStateError, match="nothing is installed"):
        open_served(site_state)
    site_state.folder.serving.write_text("{}")
    with pytest.raises(SiteStateError, match=r"serving.json is damaged"):
        site_state.served()


def test_a_model_that_was_tampered_with_is_not_served(tmp_path: Path) -> None:
    model = small_model()
    site_state = installed(tmp_path, model, site(4, 2))
    path = site_state.folder.model(model.fingerprint) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="get it again: knnper site onboard"):
        open_served(site_state)
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


def only_training(model: GlobalModel, inputs: Tensor, labels: Tensor) -> SiteData:
    """Return the data of a site with a training split alone, named by row."""
    names = tuple(map(str, range(len(labels))))
    train = NamedExamples(Examples(inputs, labels), names)
    nothing = NamedExamples(Examples(inputs[:0], labels[:0]), ())
    return SiteData(train, nothing, nothing, model.card.learned)


def test_rows_of_features_are_remembered_as_they_are(tmp_path: Path) -> None:
    model, generator = feature_model(), RandomKey(4).numpy()
    inputs = torch.from_numpy(generator.normal(2, 1, (12, 1, 1, 3)).astype("float32"))
    data = only_training(model, inputs, (inputs[:, 0, 0, 0] > 2).long())
    with open_served(installed(tmp_path, model, data)) as served:
        assert torch.equal(served.store.inputs(served.store.contents().ids), inputs)
        prediction = served.predict(inputs)
        assert prediction.vote.neighbors.names[3][0] == "3"


def test_a_model_of_features_in_another_order_is_refused(tmp_path: Path) -> None:
    inputs = torch.rand((12, 1, 1, 3), generator=torch.Generator().manual_seed(0))
    model, other = feature_model(), feature_model(("weight", "height", "age"), seed=1)
    data = only_training(model, inputs, torch.arange(12) % 2)
    with pytest.raises(SiteStateError, match="was read for the features age, height"):
        installed(tmp_path / "unread", other, data)
    site_state = installed(tmp_path, model, data)
    data = dataclasses.replace(data, task=other.card.learned)
    expected = r"takes the features weight, height, age; .*order: age, height, weight\."
    with pytest.raises(SiteStateError, match=expected):
        site_state.install(other, data, took_part=False)
    # Another model of the same features takes the place of the first.
    newer = feature_model(seed=2)
    data = dataclasses.replace(data, task=newer.card.learned)
    site_state.install(newer, data, took_part=False)
    served = site_state.served()
    assert served is not None
    assert served.model == newer.fingerprint


def test_text_is_kept_as_the_ids_of_characters_in_bytes() -> None:
    spec = store_spec(tiny_model(spec=TEXT))
    assert (spec.input, spec.input_bytes) == (InputLayout((1, 1, 6), "uint8"), 6)
    assert spec.class_names == CHARACTER_NAMES


MODEL = small_model()


def test_what_is_tested_on_leaves_the_memory(tmp_path: Path) -> None:
    after, fresh = with_test_of(site(), 12), new_site_state(tmp_path / "fresh")
    site_state = installed(tmp_path / "changed", MODEL, site())
    serving = site_state.install(MODEL, after, took_part=False).serving
    expected = fresh.install(MODEL, after, took_part=False).serving
    assert stored_names(site_state) == stored_names(fresh)
    assert not {*stored_names(site_state)} & {*after.test.names}
    assert serving.accuracy == expected.accuracy
    assert serving.accuracy.num_examples == 12
    assert serving.knn_weight == expected.knn_weight
    assert serving.expected_gain == expected.expected_gain


def test_it_comes_back_when_it_is_trained_on_again(tmp_path: Path) -> None:
    data = site(6, 2)
    site_state = installed(tmp_path, MODEL, data)
    with open_served(site_state) as served:
        served.delete(Selection(external_ids=("train/0.png",)))
    site_state.install(MODEL, with_test_of(data, 2), took_part=False)
    site_state.install(MODEL, data, took_part=False)
    names = stored_names(site_state)
    # What the owner deleted stays away.
    assert set(names) == {*data.train.names[1:], *data.validation.names}


def test_the_service_lets_it_go(tmp_path: Path) -> None:
    data = site(6, 2)
    site_state = installed(tmp_path, MODEL, data)
    with open_served(site_state) as served:
        images = data.train.examples.images
        assert served.predict(images).vote.neighbors.names[5][0] == "train/5.png"
        site_state.install(MODEL, with_test_of(data, 1), took_part=False)
        pending = read_pending(site_state.folder)
        assert pending is not None
        assert pending.leaving == ("train/5.png",)
        served.refresh()
        prediction = served.predict(images)
        assert prediction.vote.num_stored == 7
        assert not any("train/5.png" in row for row in prediction.vote.neighbors.names)
    assert read_pending(site_state.folder) is None


def test_an_example_of_the_service_counts_as_well(tmp_path: Path) -> None:
    data = site(4, 2)
    site_state = installed(tmp_path, MODEL, data)
    tested = drawn("later", 3)
    with open_served(site_state) as served:
        served.add(tested.examples.images, tested.examples.labels, tested.names)
    site_state.install(MODEL, dataclasses.replace(data, test=tested), took_part=False)
    assert stored_names(site_state) == [*data.train.names, *data.validation.names]


@pytest.mark.parametrize(
    ("owner", "step"),
    [(Store, "delete"), (Store, "reembed"), (install, "_new_examples")],
)
def test_what_was_cut_short_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, step: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    data = site(6, 3)
    before = dataclasses.replace(data, validation=part(data.validation, 0, 2))
    site_state = installed(tmp_path, MODEL, before)
    newer = small_model(seed=1)
    with monkeypatch.context() as broken:
        broken.setattr(owner, step, fails)
        with pytest.raises(OSError, match="No space left"):
            site_state.install(newer, with_test_of(data, 2), took_part=False)
    with open_served(site_state) as served:
        served.refresh()
        assert served.model.fingerprint == newer.fingerprint
    assert stored_names(site_state) == [*data.train.names[:4], *data.validation.names]


@pytest.mark.parametrize(
    ("train", "took_part", "assumed"),
    [
        ("true", None, True),
        ("false", None, False),
        ("true", False, False),
        ("false", True, True),
    ],
)
def test_a_site_that_trains_is_taken_as_trained_on(
    tmp_path: Path, train: str, took_part: bool | None, assumed: bool
) -> None:
    data = site(12, 0)
    images, labels = data.train.examples.images, data.train.examples.labels
    np.savez(tmp_path / "site.npz", inputs=images.numpy(), labels=labels.numpy())
    file = tmp_path / "client.yaml"
    file.write_text(
        f"name: site-a\nserver: nowhere.invalid:1\ninsecure: true\ntrain: {train}\n"
        "data: {name: npz, path: site.npz}\n"
    )
    onboarded = onboard(read_client(file), small_model(), took_part=took_part)
    assert onboarded.took_part is assumed
    measured_on = onboarded.serving.expected_gain.num_examples
    kept = onboarded.serving.num_train + onboarded.serving.num_validation
    assert measured_on == (onboarded.serving.num_validation if assumed else kept)


DATA = site(30, 20, 15)


def filled(model: GlobalModel, data: SiteData) -> Store:
    both = data.client_data().train_and_validation()
    return memory_store(model.embed(both.images), both.labels, 4)


def random_labels(split: NamedExamples) -> NamedExamples:
    """Images that say nothing about their labels."""
    generator = RandomKey(3, ("labels", split.names[0])).numpy()
    labels = torch.from_numpy(generator.integers(0, 4, len(split)))
    return NamedExamples(Examples(split.examples.images, labels), split.names)


def test_the_paired_gain_of_a_known_table() -> None:
    before = torch.tensor([True] * 5 + [False] * 5)
    after = torch.tensor([True] * 4 + [False] + [True] * 3 + [False] * 2)
    gain = paired_gain(before, after)

    assert gain.expected == pytest.approx(0.2)  # 3 won, 1 lost, of 10
    # ((b + c + 1) - (b - c)² / (n + 2)) / (n + 2)², with b = 3, c = 1, n = 10
    variance = (5 - 4 / 12) / 144
    assert gain.margin == pytest.approx(1.96 * np.sqrt(variance))
    assert gain.num_examples == 10


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_the_gain_is_the_difference_of_the_accuracies(
    pairs: list[tuple[bool, bool]],
) -> None:
    before, after = (torch.tensor(column) for column in zip(*pairs, strict=True))
    gain = paired_gain(before, after)
    swapped = paired_gain(after, before)
    assert gain.expected == pytest.approx(
        float(after.double().mean() - before.double().mean())
    )
    assert gain.margin is not None
    assert gain.expected is not None
    assert gain.margin > 0
    assert swapped.expected == pytest.approx(-gain.expected)
    assert swapped.margin == pytest.approx(gain.margin)


def test_the_neighbours_part_is_that_of_leaving_one_out() -> None:
    model, data = small_model(), site()
    store, fixed = filled(model, data), KnnSettings(knn_weights=(1.0,), num_neighbors=1)
    accuracy, _ = estimate(model, store, torch.arange(50), fixed, "leave_one_out")

    both = data.client_data().train_and_validation()
    embeddings = model.embed(both.images).double()
    distances = torch.cdist(embeddings, embeddings).fill_diagonal_(torch.inf)
    right = both.labels[distances.argmin(dim=1)] == both.labels
    alone = model.head(model.embed(both.images)).argmax(dim=1) == both.labels
    expected = float(right.double().mean())
    assert accuracy == Accuracy(
        float(alone.double().mean()), expected, expected, 50, "leave_one_out"
    )


def test_only_the_examples_that_are_asked_for_are_measured() -> None:
    model, data = small_model(), site()
    positions = torch.arange(30, 50)
    store = filled(model, data)
    accuracy, _ = estimate(model, store, positions, KnnSettings(), "validation")
    assert accuracy.num_examples == 20
    labels = data.validation.examples.labels
    alone = model.head(model.embed(data.validation.examples.images)).argmax(dim=1)
    assert accuracy.global_model == float((alone == labels).double().mean())


def test_the_choice_is_not_judged_by_what_it_was_made_on() -> None:
    # Labels that nothing tells: the best of many choices looks good where it was made.
    model = small_model()
    grid = KnnSettings(
        knn_weights=tuple(n / 10 for n in range(11)),
        tuning=TuningSettings(
            evidence="leave_one_out",
            num_neighbors_grid=(1, 2, 3, 5, 8),
            kernel_scale_grid=(0.1, 1.0, 10.0),
        ),
    )
    gains, fooled = [], []
    for number in range(12):
        noise = random_labels(drawn(f"noise{number}", 60)).examples
        store = empty_memory_store(StoreSpec(4), model.embedding_dim, "noise")
        new = NewExamples(model.embed(noise.images), noise.labels)
        nothing = NewExamples(new.embeddings[:0], new.labels[:0])
        tuned = fill_and_tune(store, new, nothing, model.head, grid)
        _, gain = estimate(model, store, torch.arange(60), grid, "leave_one_out")
        gains.append(gain.expected or 0.0)
        fooled.append(in_sample_gain(tuned, grid))

    assert np.mean(fooled) > 0.08
    assert np.mean(gains) < np.mean(fooled) / 2


def in_sample_gain(tuned: Tuned, settings: KnnSettings) -> float:
    """What the choice gains on the very examples that it was made on."""
    choice = tuned.choice
    tried = ParameterGrid.of(
        (0.0, choice.knn_weight), (choice.num_neighbors,), (choice.kernel_scale,)
    )
    kernel, criterion = KERNELS[settings.kernel], CRITERIA["accuracy"]
    scores = score(tuned.evidence, tried, kernel, criterion)[:, 0, 0]
    return float(scores[-1] - scores[0]) / len(tuned.evidence)


def test_where_the_memory_loses_the_global_model_is_served(tmp_path: Path) -> None:
    # λ is fixed to the neighbours, all of which count alike: they know the commonest
    # label only, and the global model is always right.
    model = small_model(seed=6, knn_weights=[1.0], num_neighbors=400, kernel_scale=1e6)
    images = drawn("train", 400).examples.images
    labels = model.head(model.embed(images)).argmax(dim=1)
    train = NamedExamples(Examples(images, labels), drawn("train", 400).names)
    data = SiteData(train, drawn("validation", 0), drawn("test", 0), TASK)
    serving = new_site_state(tmp_path).install(model, data, took_part=False).serving

    assert serving.knn_weight == 0.0
    assert serving.tuned_on.overruled
    assert serving.accuracy.global_model == serving.accuracy.mixed == 1.0
    assert serving.accuracy.knn is not None
    assert serving.accuracy.knn < 0.9
    assert serving.expected_gain == Gain(0.0, 0.0, 400)


@pytest.mark.parametrize(
    ("sizes", "num_measured"), [((30, 20, 0), 20), ((30, 5, 0), None)]
)
def test_seen_client_is_measured_on_validation_only(
    tmp_path: Path, sizes: tuple[int, int, int], num_measured: int | None
) -> None:
    site_state = new_site_state(tmp_path)
    serving = site_state.install(small_model(), site(*sizes), took_part=True).serving
    assert serving.accuracy.num_examples == num_measured
    assert not serving.expected_gain.is_loss
    assert serving.accuracy.measured_on == ("validation" if num_measured else None)


def test_figures_are_those_of_the_simulations_client(tmp_path: Path) -> None:
    decided = new_site_state(tmp_path).install(MODEL, DATA, took_part=True)
    predictor = simulated(MODEL, DATA)
    test = DATA.test.examples
    assert decided.mixed.equal(predictor(test.images))
    alone = dataclasses.replace(predictor, knn_weight=0.0)
    assert decided.global_model.equal(alone(test.images))
    only = dataclasses.replace(predictor, knn_weight=1.0)
    assert decided.serving.accuracy.knn == evaluate(only, test).accuracy
    assert decided.chosen == predictor.describe()
    accuracy = decided.serving.accuracy
    assert (accuracy.measured_on, accuracy.num_examples) == ("test", 15)
    assert accuracy.global_model == evaluate(alone, test).accuracy
    assert accuracy.mixed == evaluate(predictor, test).accuracy
    assert decided.serving.expected_gain.num_examples == 20
    without = new_site_state(tmp_path / "other").install(MODEL, site(), took_part=True)
    assert len(without.mixed) == 0
    assert without.serving.accuracy.measured_on == "validation"


def test_all_that_the_memory_holds_is_reported(tmp_path: Path) -> None:
    site_state = installed(tmp_path, MODEL, DATA)
    fewer = dataclasses.replace(DATA, train=drawn("train", 10))
    decided = site_state.install(MODEL, fewer, took_part=True)
    assert decided.chosen["num_stored"] == 50
