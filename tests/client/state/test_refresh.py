"""A memory is brought up to date with data that grew, changed and shrank."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from knnper.client.data_changes import DataChanges
from knnper.client.onboarding import onboard, refresh
from knnper.client.served_model import open_served
from knnper.client.settings import ClientSettings, read_client
from knnper.client.site_state import SiteState
from knnper.client.state import SiteStateError
from knnper.data.site import open_site
from knnper.datastore.examples import Ids, NewExamples, Selection, StoreFullError
from knnper.datastore.store import Store, StoreReader, open_store
from knnper.strategies.core.exported_model import GlobalModel
from tests.client.state.small_site import (
    TASK,
    feature_model,
    model_folders,
    small_model,
    stored_names,
    with_test_of,
)

FILE = "name: site-a\nserver: nowhere.invalid:1\ninsecure: true\ntrain: false\n"


class Images:
    """A folder of images whose pixels are all ``value``."""

    model = small_model()
    kind = "{name: image_folder, path: data}"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        for number in range(20):
            self.put(number, number)

    def name(self, number: int) -> str:
        return f"{TASK.class_names[number % 4]}/{number:03}.png"

    def put(self, number: int, value: int) -> None:
        path = self.folder / self.name(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)

    def remove(self, number: int) -> None:
        (self.folder / self.name(number)).unlink()


class Table:
    """A CSV with a column of ids."""

    model = feature_model()
    kind = "{name: table, path: data.csv, label: ill, id: patient}"

    def __init__(self, folder: Path) -> None:
        self._file = folder / "data.csv"
        self._rows = dict[int, float]()
        for number in range(20):
            self.put(number, number)

    def name(self, number: int) -> str:
        return f"p{number:03}"

    def put(self, number: int, value: float) -> None:
        self._rows[number] = value
        self._write()

    def remove(self, number: int) -> None:
        del self._rows[number]
        self._write()

    def _write(self) -> None:
        with self._file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["patient", "age", "height", "weight", "ill"])
            for number, value in self._rows.items():
                label = ("no", "yes")[number % 2]
                writer.writerow([self.name(number), value, 1.7, 70 + number, label])


@dataclass
class Site:
    """A site with a memory, and its data."""

    data: Images | Table
    settings: ClientSettings

    @property
    def model(self) -> GlobalModel:
        return self.data.model

    @property
    def state(self) -> SiteState:
        return SiteState(self.settings.state, "site-a")

    def splits(self) -> Mapping[str, set[str]]:
        """Return the names in the data by split."""
        learned = self.model.card.learned
        site_data = open_site(self.settings.data, self.settings.base, learned)
        return {split: set(named.names) for split, named in site_data.splits()}

    def stored(self) -> dict[str, Tensor]:
        """Return the stored inputs by name."""
        with open_store(self.state.folder.store) as store:
            ids = store.contents().ids
            names = map(str, store.external_ids(ids))
            return dict(zip(names, store.inputs(ids), strict=True))

    def number_in(self, *splits: str) -> int:
        """Return the first example's number that lies in one of the splits."""
        names = set().union(*(self.splits()[split] for split in splits))
        return next(n for n in range(40) if self.data.name(n) in names)


def client_of(folder: Path, data: Images | Table) -> ClientSettings:
    """Write a client's file for the data in a folder, and read it."""
    file = folder / "client.yaml"
    file.write_text(f"{FILE}data: {data.kind}\n")
    return read_client(file)


@pytest.fixture(params=[Images, Table])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    data = request.param(tmp_path)
    settings = client_of(tmp_path, data)
    onboard(settings, data.model)
    return Site(data, settings)


images_alone = pytest.mark.parametrize("site", [Images], indirect=True)


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the numbers of inputs that are embedded from now on."""
    counts: list[int] = []
    embed = GlobalModel.embed

    def counting(self: GlobalModel, images: Tensor) -> Tensor:
        counts.append(len(images))
        return embed(self, images)

    monkeypatch.setattr(GlobalModel, "embed", counting)
    return counts


def test_nothing_new_changes_nothing(site: Site, embedded: list[int]) -> None:
    before = site.state.served()
    refreshed = refresh(site.settings)
    assert not refreshed.changes
    assert refreshed.serving == before
    assert embedded == []


def test_new_examples_are_remembered_and_those_tested_on_are_not(
    site: Site, embedded: list[int]
) -> None:
    before = site.splits()
    for number in range(20, 40):
        site.data.put(number, number)
    after = site.splits()
    assert after["test"] - before["test"], "the case is worth nothing else"
    expected_new = (after["train"] | after["validation"]) - set(site.stored())
    refreshed = refresh(site.settings)
    changes = refreshed.changes
    assert set(changes.new) == expected_new
    assert (changes.changed, changes.vanished, changes.tested) == ((), (), ())
    stored = site.stored()
    assert set(stored) == after["train"] | after["validation"]
    assert not set(stored) & after["test"]
    # What is new, and the test split, on which it is measured.
    assert sum(embedded) == len(expected_new) + len(after["test"])
    serving = site.state.served()
    assert serving == refreshed.serving
    assert serving.num_train + serving.num_validation == len(stored)
    assert serving.model == site.model.fingerprint
    assert model_folders(site.state) == {site.model.fingerprint}
    with open_served(site.state) as served:
        images = torch.stack([stored[name] for name in sorted(expected_new)])
        nearest = [row[0] for row in served.predict(images).vote.neighbors.names]
        assert set(nearest) <= set(stored)
        assert len(set(nearest) & expected_new) > 0
    assert not refresh(site.settings).changes


def test_a_changed_example_is_replaced(site: Site) -> None:
    number = site.number_in("train")
    name = site.data.name(number)
    before = site.stored()[name]
    site.data.put(number, 77)
    changes = refresh(site.settings).changes
    assert changes == DataChanges(changed=(name,))
    assert not torch.equal(site.stored()[name], before)
    assert len(site.stored()) == len(stored_names(site.state))
    assert not refresh(site.settings).changes


def test_what_has_vanished_is_kept_until_it_is_to_be_forgotten(site: Site) -> None:
    number = site.number_in("train")
    name = site.data.name(number)
    kept = site.stored()
    site.data.remove(number)
    for _ in range(2):
        assert refresh(site.settings).changes == DataChanges(vanished=(name,))
        assert set(site.stored()) == set(kept)
    looked = refresh(site.settings, forget_vanished=True, only_look=True)
    assert set(site.stored()) == set(kept)
    assert refresh(site.settings, forget_vanished=True).changes == looked.changes
    assert set(site.stored()) == set(kept) - {name}
    # It was not deleted by its owner: should it come back, it is remembered again.
    site.data.put(number, number)
    assert refresh(site.settings).changes == DataChanges(new=(name,))
    assert set(site.stored()) == set(kept)


def test_what_the_owner_deleted_or_added_is_left_alone(site: Site) -> None:
    number = site.number_in("train")
    name = site.data.name(number)
    spec = site.model.spec
    example = torch.zeros((1, *spec.image_shape), dtype=spec.torch_dtype)
    with open_served(site.state) as served:
        served.delete(Selection(external_ids=(name,)))
        served.add(example, torch.zeros(1, dtype=torch.int64), ["ward/17"])
    assert not refresh(site.settings, forget_vanished=True).changes
    assert name not in site.stored()
    assert "ward/17" in site.stored()


def test_examples_deleted_during_a_refresh_are_left_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_inputs = StoreReader.inputs
    names = [site.data.name(site.number_in(split)) for split in ("train", "validation")]
    to_delete = list(names)
    with open_served(site.state) as served:

        def inputs(store: StoreReader, ids: Ids) -> Tensor:
            if to_delete:
                served.delete(Selection(external_ids=(to_delete.pop(),)))
            return read_inputs(store, ids)

        monkeypatch.setattr(StoreReader, "inputs", inputs)
        # Each of the two deletions starts the comparison again.
        site.data.put(20, 20)
        changes = refresh(site.settings).changes
    assert not to_delete
    assert changes == DataChanges(new=(site.data.name(20),))
    assert not set(names) & set(site.stored())


def test_what_is_tested_on_now_leaves(site: Site) -> None:
    data = open_site(site.settings.data, site.settings.base, site.model.card.learned)
    moved = with_test_of(data, 1)
    changes = site.state.changes(moved)
    assert changes.tested == moved.test.names
    site.state.install(site.model, moved, took_part=False)
    assert moved.test.names[0] not in site.stored()


def test_a_service_that_runs_takes_it_up(site: Site) -> None:
    with open_served(site.state) as served:
        for number in range(20, 40):
            site.data.put(number, number)
        refreshed = refresh(site.settings)
        assert refreshed.changes.new
        assert len(served.store) < len(refreshed.changes.new) + 20
        assert served.refresh()
        assert served.serving == refreshed.serving
        stored = served.store.external_ids(served.store.contents().ids)
        assert set(refreshed.changes.new) <= set(stored)
        assert not served.refresh()
    assert not refresh(site.settings).changes


@pytest.mark.parametrize("step", ["delete", "add"])
@pytest.mark.parametrize("is_done", [False, True])
def test_what_was_interrupted_can_be_repeated(
    site: Site, step: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, num_removed = (site.number_in("train"), site.number_in("validation"))
    site.data.put(changed, 77)
    site.data.remove(num_removed)
    for number in range(20, 30):
        site.data.put(number, number)
    does = getattr(Store, step)

    def interrupted(self: Store, argument: object, *arguments: object) -> object:
        # The store in memory, in which λ is chosen, is given no names.
        if isinstance(argument, NewExamples) and argument.external_ids is None:
            return does(self, argument, *arguments)
        if is_done:
            does(self, argument, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Store, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            refresh(site.settings, forget_vanished=True)
    refresh(site.settings, forget_vanished=True)
    splits = site.splits()
    assert set(site.stored()) == splits["train"] | splits["validation"]
    assert not refresh(site.settings, forget_vanished=True).changes
    served = site.state.served()
    assert served is not None
    assert served.num_train == len(splits["train"])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fifo", lambda old, new: new[-12:]),
        ("fixed", lambda old, new: old[:12]),
    ],
)
def test_the_eviction_policy_is_kept_to(
    tmp_path: Path,
    policy: str,
    expected: Callable[[list[str], list[str]], list[str]],
) -> None:
    data = Images(tmp_path)
    model = small_model(store={"policy": policy, "capacity": 12})
    settings = client_of(tmp_path, data)
    onboard(settings, model)
    state = SiteState(settings.state, "site-a")
    old = [str(name) for name in stored_names(state)]
    assert len(old) == 12
    for number in range(20, 40):
        data.put(number, number)
    new = list(refresh(settings).changes.new)
    assert [str(name) for name in stored_names(state)] == expected(old, new)
    # What did not stay does not count as new.
    assert not refresh(settings).changes


def test_a_memory_that_is_full_is_left_as_it_is(tmp_path: Path) -> None:
    data = Images(tmp_path)
    model = small_model(store={"policy": "concatenate", "capacity": 20})
    settings = client_of(tmp_path, data)
    onboard(settings, model)
    state = SiteState(settings.state, "site-a")
    old = stored_names(state)
    for number in range(20, 40):
        data.put(number, number)
    for _ in range(2):
        with pytest.raises(StoreFullError, match="of at most 20"):
            refresh(settings)
    assert stored_names(state) == old
    with open_served(state) as served:
        assert not served.refresh()


def test_without_a_model_there_is_nothing_to_bring_up_to_date(tmp_path: Path) -> None:
    data = Images(tmp_path)
    with pytest.raises(SiteStateError, match="knnper site onboard"):
        refresh(client_of(tmp_path, data))


def test_a_removed_memory_is_made_of_all_data(site: Site) -> None:
    splits = site.splits()
    for path in sorted(site.state.folder.store.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    refreshed = refresh(site.settings)
    assert set(refreshed.changes.new) == splits["train"] | splits["validation"]
    assert set(site.stored()) == set(refreshed.changes.new)


def test_participation_is_kept(site: Site) -> None:
    # The site's file says `train: false`; the federation knew better.
    site.state.install(
        site.model,
        open_site(site.settings.data, site.settings.base, site.model.card.learned),
        took_part=True,
    )
    for number in range(20, 40):
        site.data.put(number, number)
    assert refresh(site.settings).serving.took_part is True


@images_alone
def test_the_model_that_is_about_to_be_served_is_the_one(site: Site) -> None:
    newer = small_model(seed=1)
    data = open_site(site.settings.data, site.settings.base, newer.card.learned)
    with open_served(site.state) as served:
        site.state.install(newer, data, took_part=False)
        for number in range(20, 40):
            site.data.put(number, number)
        refreshed = refresh(site.settings)
        assert refreshed.serving.model == newer.fingerprint
        assert served.refresh()
        assert served.model.fingerprint == newer.fingerprint
    assert not refresh(site.settings).changes


@images_alone
def test_a_file_that_cannot_be_read_has_not_vanished(site: Site) -> None:
    name = site.data.name(site.number_in("train"))
    assert isinstance(site.data, Images)
    (site.data.folder / name).write_bytes(b"torn")
    skips = read_client(site.settings.file, ["data.on_error=skip"])
    assert not refresh(skips, forget_vanished=True).changes
    assert name in site.stored()
