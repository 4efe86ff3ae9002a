"""What answers while examples come and go, and while the model changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from knnper.client import served_model
from knnper.client.served_model import ServedModel, open_served
from knnper.client.site_state import SiteState
from knnper.client.state import (
    Accuracy,
    Gain,
    SiteStateError,
    read_serving,
    write_serving,
)
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.class_prior import (
    ClassPrior,
    ClassPriorSettings,
    adapt_probabilities,
)
from knnper.datastore.examples import Selection, StoreMismatchError
from knnper.datastore.prediction import KnnPredictor, NeighborClassifier
from knnper.datastore.store import open_store
from knnper.strategies.core.exported_model import GlobalModel
from tests.client.state.small_site import (
    TASK,
    drawn,
    installed,
    new_site_state,
    queries,
    simulated,
    site,
    small_model,
    stored_names,
)

FIXED: dict[str, Any] = {"knn_weights": [0.5], "num_neighbors": 3}


@pytest.fixture
def site_state(tmp_path: Path) -> SiteState:
    return installed(tmp_path, small_model(**FIXED), site())


def expected(served: ServedModel, model: GlobalModel) -> torch.Tensor:
    neighbors = NeighborClassifier(served.store, 3, "paper", 1.0)
    predictor = KnnPredictor(model.embed, model.head, neighbors, 0.5)
    return predictor(queries())


def test_an_answer_explains_itself(site_state: SiteState) -> None:
    with open_served(site_state) as served:
        prediction = served.predict(queries())
        assert torch.equal(prediction.probabilities, expected(served, served.model))
        assert prediction.vote.probabilities is not None
        mixed = (
            0.5 * prediction.vote.probabilities + 0.5 * prediction.global_probabilities
        )
        torch.testing.assert_close(prediction.probabilities, mixed)
        assert (prediction.knn_weight, prediction.vote.num_stored) == (0.5, 50)
        assert prediction.vote.neighbors.fingerprint == served.serving.model
        names = stored_names(site_state)
        for ids, shown_names in zip(
            prediction.vote.neighbors.ids, prediction.vote.neighbors.names, strict=True
        ):
            assert shown_names == [names[int(example_id) - 1] for example_id in ids]
        votes = torch.zeros(16, 4, dtype=torch.float64)
        votes.scatter_add_(1, prediction.vote.neighbors.labels, prediction.vote.weights)
        torch.testing.assert_close(votes.float(), prediction.vote.probabilities)
        none = served.predict(queries()[:0])
        assert (none.probabilities.shape, none.vote.neighbors.names) == ((0, 4), [])


def test_predictor_is_built_once_per_model(
    site_state: SiteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def building(kind: type[Any]) -> Callable[..., Any]:
        def build(*args: Any, **kwargs: Any) -> Any:
            built.append(kind.__name__)
            return kind(*args, **kwargs)

        return build

    for kind in (NeighborClassifier, KnnPredictor):
        monkeypatch.setattr(f"{served_model.__name__}.{kind.__name__}", building(kind))
    expected_kinds = ["NeighborClassifier", "KnnPredictor"]
    example = drawn("one", 1).examples
    with open_served(site_state) as served:
        for _ in range(3):
            served.predict(queries())
            served.add(example.images, example.labels)
            assert not served.refresh()
        served.delete(Selection(ids=(1,)))
        served.predict(queries())
        assert built == expected_kinds
        site_state.install(small_model(seed=1, **FIXED), site(), took_part=False)
        assert served.refresh()
        served.predict(queries())
        assert built == 2 * expected_kinds


def test_what_is_added_is_found_and_what_is_deleted_is_not(
    site_state: SiteState,
) -> None:
    example = drawn("one", 1).examples
    with open_served(site_state) as served:
        added = served.add(example.images, example.labels, ["mine"])
        prediction = served.predict(example.images)
        assert prediction.vote.neighbors.names[0][0] == "mine"
        assert prediction.vote.neighbors.squared_distances[0, 0] < 1e-9
        assert prediction.vote.num_stored == 51
        deleted = served.delete(Selection(external_ids=("mine",)))
        assert deleted.tolist() == added.ids.tolist()
        assert "mine" not in served.predict(example.images).vote.neighbors.names[0]
        assert not served.refresh()


def test_busy_store_is_updated_by_the_service(site_state: SiteState) -> None:
    first, second = small_model(**FIXED), small_model(seed=1, **FIXED)
    with open_served(site_state) as served:
        site_state.install(second, site(33, 20), took_part=False)

        assert served.model.fingerprint == first.fingerprint
        assert torch.equal(
            served.predict(queries()).probabilities, expected(served, first)
        )
        assert served.refresh()
        assert served.model.fingerprint == second.fingerprint
        prediction = served.predict(queries())
        assert torch.equal(prediction.probabilities, expected(served, second))
        assert prediction.vote.num_stored == 53
        assert not served.refresh()
    busy = site_state.served()
    assert busy is not None
    assert (busy.model, busy.previous) == (second.fingerprint, first.fingerprint)
    assert not site_state.folder.pending.exists()


def test_the_last_of_several_models_and_choices_is_served(
    site_state: SiteState,
) -> None:
    with open_served(site_state) as served:
        for seed in (1, 2):
            model = small_model(seed=seed, **FIXED)
            site_state.install(model, site(), took_part=False)
        assert served.refresh()
        assert served.model.fingerprint == model.fingerprint
        other = small_model(seed=2, knn_weights=[0.9])
        site_state.install(other, site(), took_part=False)
        assert served.serving.knn_weight == 0.5
        assert served.refresh()
        assert served.serving.knn_weight == 0.9


def test_what_was_cut_short_after_the_switch_is_finished(site_state: SiteState) -> None:
    second = small_model(seed=1, **FIXED)
    with open_served(site_state):
        site_state.install(second, site(33, 20), took_part=False)
    with open_store(site_state.folder.store, writable=True) as store:
        store.reembed(second.embed, second.fingerprint)
    with open_served(site_state) as served:
        assert served.model.fingerprint == second.fingerprint
        assert len(served.store) == 53
    assert not site_state.folder.pending.exists()


def test_a_store_of_an_unknown_model_is_brought_back(site_state: SiteState) -> None:
    other = small_model(seed=9)
    with open_store(site_state.folder.store, writable=True) as store:
        store.reembed(other.embed, other.fingerprint)
        with pytest.raises(SiteStateError, match=r"which was not installed"):
            ServedModel(site_state, store)
    with open_served(site_state) as served:
        assert served.model.fingerprint == small_model(**FIXED).fingerprint
        assert served.predict(queries()).vote.num_stored == 50
        with pytest.raises(StoreMismatchError, match="found the model"):
            served.store.search(other.embed(queries()), 3, other.fingerprint)


STRENGTHS = [1.0, 10.0]
ADAPTING: dict[str, Any] = {
    "knn_weights": [0.5],
    "num_neighbors": 3,
    "class_prior": {"strengths": STRENGTHS, "sharpness": [2.0]},
}
PRIOR = ClassPrior(ClassPriorSettings(tuple(STRENGTHS), sharpness=(2.0,)), 2.0)


def few_classes() -> SiteData:
    """A site that knows the first two classes alone."""

    def kept(named: NamedExamples) -> NamedExamples:
        rows = (named.examples.labels < 2).nonzero()[:, 0]
        names = tuple(named.names[row] for row in rows.tolist())
        return NamedExamples(named.examples.take(rows), names)

    whole = site(40, 20)
    return SiteData(kept(whole.train), kept(whole.validation), drawn("test", 0), TASK)


@pytest.fixture
def adapting(tmp_path: Path) -> SiteState:
    return installed(tmp_path, small_model(**ADAPTING), few_classes())


def test_it_serves_what_a_simulated_client_does(adapting: SiteState) -> None:
    expected = simulated(small_model(**ADAPTING), few_classes())
    with open_served(adapting) as served:
        prediction = served.predict(queries())
        assert served.serving.class_prior == PRIOR
    assert torch.equal(prediction.probabilities, expected(queries()))


def test_what_is_added_and_deleted_counts_at_once(adapting: SiteState) -> None:
    late = drawn("late", 30).examples
    late = Examples(late.images, torch.full_like(late.labels, 3))
    with open_served(adapting) as served:
        before = served.predict(queries())
        served.add(late.images, late.labels, [f"late/{n}" for n in range(30)])
        after = served.predict(queries())
        counts = torch.bincount(
            torch.from_numpy(served.store.contents().labels), minlength=4
        )
        served.delete(Selection(labels=(3,)))
        again = served.predict(queries())

    assert before.adapted_probabilities is not None
    assert after.adapted_probabilities is not None
    expected = adapt_probabilities(after.global_probabilities, counts[None], PRIOR)
    assert torch.equal(after.adapted_probabilities, expected)
    grown = after.adapted_probabilities[:, 3] > before.adapted_probabilities[:, 3]
    assert bool(grown.all())
    assert torch.equal(again.probabilities, before.probabilities)


def test_it_is_written_down_and_a_file_without_it_is_read(
    adapting: SiteState, tmp_path: Path
) -> None:
    serving = adapting.served()
    assert serving is not None
    file = tmp_path / "serving.json"
    write_serving(file, serving)
    assert read_serving(file) == serving

    without = file.read_text().replace('"class_prior"', '"unknown"')
    file.write_text(without)
    assert read_serving(file) == replace(serving, class_prior=None)


def test_a_loss_beyond_doubt_takes_the_class_prior_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = (Accuracy(0.6, 0.5, 0.5, 30, "validation"), Gain(-0.1, 0.05, 30))
    monkeypatch.setattr("knnper.client.install.estimate", lambda *_: lost)
    decided = new_site_state(tmp_path).install(
        small_model(**ADAPTING), few_classes(), took_part=False
    )
    assert decided.serving.tuned_on.overruled
    assert decided.serving.class_prior is None
    assert (decided.chosen["class_prior"], decided.chosen["knn_weight"]) == (0, 0)
    assert decided.serving.accuracy.mixed == 0.6
    assert decided.mixed.equal(decided.global_model), "reported as it is served"
