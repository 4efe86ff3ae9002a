"""An owner who changes the splits tests on nothing that the memory holds."""

import dataclasses
from pathlib import Path

import pytest
import torch

from knnper.client import install
from knnper.client.install import open_served
from knnper.client.state import read_pending
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import Selection
from knnper.datastore.store import Store
from tests.client.state.small_site import (
    drawn,
    installed,
    new_site_state,
    site,
    small_model,
    stored_names,
)

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
