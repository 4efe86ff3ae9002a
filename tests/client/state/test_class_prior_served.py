"""A client that serves the global model with its own shares of the classes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from knnper.client.install import SiteState, decide, open_served
from knnper.client.state import Accuracy, Gain, read_serving, write_serving
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import NewExamples, Selection, StoreSpec
from knnper.datastore.prediction import ClassPrior, ClassPriorSettings, adapted
from knnper.datastore.store import UNNAMED, empty_memory_store
from knnper.strategies.core.exported_model import GlobalModel
from knnper.strategies.knn_per import Tuned, remember
from tests.client.state.small_site import (
    TASK,
    drawn,
    installed,
    queries,
    simulated,
    site,
    small_model,
)

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
def site_state(tmp_path: Path) -> SiteState:
    return installed(tmp_path, small_model(**ADAPTING), few_classes())


def test_it_serves_what_a_simulated_client_does(site_state: SiteState) -> None:
    expected = simulated(small_model(**ADAPTING), few_classes())
    with open_served(site_state, writable=False) as served:
        made = served.predict(queries())
        assert served.serving.class_prior == PRIOR
    assert torch.equal(made.probabilities, expected(queries()))


def test_what_is_added_and_deleted_counts_at_once(site_state: SiteState) -> None:
    late = drawn("late", 30).examples
    late = Examples(late.images, torch.full_like(late.labels, 3))
    with open_served(site_state, writable=True) as served:
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
    expected = adapted(after.global_probabilities, counts[None], PRIOR)
    assert torch.equal(after.adapted_probabilities, expected)
    grown = after.adapted_probabilities[:, 3] > before.adapted_probabilities[:, 3]
    assert bool(grown.all())
    assert torch.equal(again.probabilities, before.probabilities)


def test_without_a_class_prior_none_is_told_of(tmp_path: Path) -> None:
    site_state = installed(tmp_path, small_model(knn_weights=[0.5]), few_classes())
    with open_served(site_state, writable=False) as served:
        assert served.predict(queries()).adapted_probabilities is None
        assert served.serving.class_prior is None


def test_it_is_written_down_and_a_file_without_it_is_read(
    site_state: SiteState, tmp_path: Path
) -> None:
    serving = site_state.served()
    assert serving is not None
    file = tmp_path / "serving.json"
    write_serving(file, serving)
    assert read_serving(file) == serving

    without = file.read_text().replace('"class_prior"', '"unknown"')
    file.write_text(without)
    assert read_serving(file) == replace(serving, class_prior=None)


def test_a_loss_beyond_doubt_takes_the_class_prior_back(
    site_state: SiteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = small_model(**ADAPTING), few_classes()
    lost = (Accuracy(0.6, 0.5, 0.5, 30, "validation"), Gain(-0.1, 0.05, 30))
    monkeypatch.setattr("knnper.client.install.estimate", lambda *_: lost)
    with open_served(site_state, writable=False) as served:
        tuned = _tuned(model, data)
        decided = decide(
            model, served.store, tuned, len(data.train), data, took_part=False
        )
    assert tuned.choice.class_prior == PRIOR
    assert decided.serving.tuned_on.overruled
    assert decided.serving.class_prior is None
    assert (decided.chosen["class_prior"], decided.chosen["knn_weight"]) == (0, 0)
    assert decided.serving.accuracy.mixed == 0.6


def _tuned(model: GlobalModel, data: SiteData) -> Tuned:
    store = empty_memory_store(StoreSpec(4), model.embedding_dim, UNNAMED)
    train, validation = (
        NewExamples(model.embed(one.examples.images), one.examples.labels)
        for one in (data.train, data.validation)
    )
    return remember(store, train, validation, model.head, model.card.memory)
