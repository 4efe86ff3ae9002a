import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data import text as plays
from knnper.data import text as written
from knnper.data.cache import CentralSplit, EntryWriter
from knnper.data.characters import ALPHABET, encode
from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.text import PlaysSettings
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.simulation.partition.settings import PartitionSettings
from knnper.simulation.partition.split import make_partition

ANNE = "the quick brown fox jumps over the lazy dog " * 3
BEN = "pack my box with five dozen liquor jugs. " * 2


@pytest.fixture(autouse=True)
def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = {"Ben": BEN, "Anne": ANNE, "Cy": "Too little."}
    Path("said.json").write_text(json.dumps(written))


def load(path: str = "said.json", **changes: Any) -> Dataset:
    chosen = {"window": 8, "stride": 3, "min_characters": 20, **changes}
    return PlaysSettings(path, **chosen).load()


def clients_of(path: str) -> set[int]:
    client_ids = load(path).train.client_ids
    return set() if client_ids is None else set(client_ids.tolist())


def of_client(split: LabelledArrays, client: int) -> list[tuple[bytes, int]]:
    assert split.client_ids is not None
    chosen = split.client_ids == client
    windows = split.images[chosen].reshape(-1, split.images.shape[3])
    return [
        (row.tobytes(), int(label))
        for row, label in zip(windows, split.labels[chosen], strict=True)
    ]


def test_every_example_is_a_window_and_what_follows() -> None:
    dataset = load(split="random")
    for client, text in enumerate([ANNE, BEN]):
        ids = encode(text)
        expected = [
            (ids[at - 8 : at].tobytes(), int(ids[at])) for at in range(8, len(ids), 3)
        ]
        train, test = of_client(dataset.train, client), of_client(dataset.test, client)
        assert sorted(train + test) == sorted(expected)
        assert len(test) == round(0.2 * len(expected))


def test_the_inputs_are_described_as_text() -> None:
    spec = load().spec
    assert (spec.image_shape, spec.num_classes) == ((1, 1, 8), 81)
    assert (spec.dtype, spec.stored_dtype) == ("token", "uint8")
    assert (spec.mean, spec.std) == ((), ())
    again = load()
    assert again.client_names == ("Anne", "Ben")
    assert again.spec == spec
    assert again.class_names[encode("a")[0]] == "'a'"


def test_the_seed_chooses_what_is_tested_on() -> None:
    first, second = (load(split="random", seed=seed).test.images for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_another_file_or_reading_of_it_is_another_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = load()
    Path("said.json").write_text(json.dumps({"Ben": BEN}))
    assert len(load().train) < len(before.train)
    Path("play.txt").write_text(f"ANNE.\n{ANNE}\n\nBEN.\n{BEN}\n")
    before = load("play.txt")
    monkeypatch.setattr(written, "find_speeches", lambda play, source: {"BEN": BEN})
    assert len(load("play.txt").train) < len(before.train)


def test_a_play_and_a_folder_of_plays() -> None:
    Path("plays").mkdir()
    for name in ("alone.txt", "plays/second.txt", "plays/third.txt"):
        Path(name).write_text(f"ANNE.\n{ANNE}\n\nBEN.\n{BEN}\n")
    assert clients_of("alone.txt") == {0, 1}
    assert clients_of("plays") == {0, 1, 2, 3}
    assert len(load("plays").train) == 2 * len(load("alone.txt").train)


def test_texts_of_the_same_letters_have_digests_of_their_own() -> None:
    assert written.hash_texts({"a": "bc"}) != written.hash_texts({"ab": "c"})
    assert written.hash_texts({"a": "\ud800"}) == written.hash_texts({"a": "\ud800"})
    two = {"a": "x", "b": "y"}
    assert written.hash_texts(two) == written.hash_texts(dict(reversed(two.items())))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"Prose. No play.", "found no speech, expected lines that begin"),
        ("a.txt", b"ANNE. caf\xe9", "byte 9 is not UTF-8; convert the file"),
        ("a.txt", "ANNE. To be".encode("utf-16"), "file: it is encoded in UTF-16"),
        ("a.json", b'{"Anne": 3}', r"expected a play(?s:.*)Anne\n.*valid string"),
        ("a.json", b'{"A": "a", "B": ["a"]}', r"expected a play(?s:.*)B\n.* string"),
        ("a.json", b"[1]", r"expected a play(?s:.*)should be an object"),
        ("a.json", b'{"Anne": "a', r"expected a play(?s:.*)Invalid JSON"),
        ("a.json", b'{"Anne": "Too little."}', "with 20 characters, the longest .* 11"),
        ("a.json", b"{}", "found no speaker with 20 characters"),
    ],
)
def test_files_that_are_refused(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(name)


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("none.txt", {}, r"none.txt: found no file or folder, expect"),
        ("empty", {}, r"found no .txt file in it"),
        ("said.json", {"window": len(ANNE)}, r"lower data.min_characters or data.wind"),
        ("said.json", {"stride": 100}, "too few examples for test data; raise data"),
        ("cyrillic.json", {}, r"lic\.json: 76% of the characters are outside"),
    ],
)
def test_too_little_text(path: str, settings: dict[str, Any], message: str) -> None:
    Path("empty").mkdir()
    Path("cyrillic.json").write_text(json.dumps({"Anne": "быть или не быть " * 9}))
    with pytest.raises(DataError, match=message):
        load(path, **settings)


@settings(max_examples=25, deadline=None)
@given(
    window=st.integers(1, 30),
    stride=st.integers(1, 20),
    fraction=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
)
def test_what_is_tested_on_comes_after_what_is_trained_on(
    window: int, stride: int, fraction: float
) -> None:
    dataset = load(window=window, stride=stride, test_fraction=fraction)
    for client, text in enumerate([ANNE, BEN]):
        ids = encode(text)
        places = range(window, len(ids), stride)
        train, test = of_client(dataset.train, client), of_client(dataset.test, client)
        assert train + test == [
            (ids[at - window : at].tobytes(), int(ids[at])) for at in places
        ]
        assert len(test) == min(int(fraction * len(places) + 0.5), len(places) - 1)


def test_hidden_files_of_a_folder_and_endings_in_capitals() -> None:
    Path("plays").mkdir()
    for name in ("first.txt", "SECOND.TXT"):
        Path("plays", name).write_text(f"ANNE.\n{ANNE}\n")
    Path("plays", "._first.txt").write_bytes(b"\xff\x00")
    assert clients_of("plays") == {0, 1}
    Path("said.json").rename("SAID.JSON")
    assert clients_of("SAID.JSON") == {0, 1}


def test_windows_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(stride=1)
    added = []
    append = EntryWriter.append_of_client

    def noted(self: EntryWriter, split: CentralSplit, images: Any, *rest: Any) -> None:
        added.append(len(images))
        append(self, split, images, *rest)

    monkeypatch.setattr(EntryWriter, "append_of_client", noted)
    monkeypatch.setattr(plays, "_WINDOWS_AT_ONCE", 7)
    monkeypatch.setenv("KNNPER_CACHE", str(Path("another").absolute()))
    parts = load(stride=1)
    assert max(added) == 7
    for one, other in ((whole.train, parts.train), (whole.test, parts.test)):
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(one.labels, other.labels)
        np.testing.assert_array_equal(one.client_ids, other.client_ids)


def test_unknown_characters_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    Path("said.json").write_text(json.dumps({"Anne": ANNE + "#*#" * 5}))
    load()
    assert "10% of the characters are outside of the alphabet" in caplog.text
    assert "most often '#', '*'; all of them become the" in caplog.text
    caplog.clear()
    Path("said.json").write_text(json.dumps({"Anne": ANNE + "#"}))
    load()
    assert not caplog.records


@pytest.mark.parametrize("split", ["time", "random"])
def test_what_is_validated_on_has_not_been_learned(split: str) -> None:
    # Every character occurs once, so that a label tells its place.
    Path("said.json").write_text(json.dumps({"Anne": ALPHABET[1:]}))
    dataset = load(split=split, stride=1)
    choice = Choice[Settings]("natural", PartitionSettings(validation_fraction=0.3))
    (client,) = make_partition(dataset, choice, RandomKey(0)).clients
    windows = dataset.train.images[client.train]
    learned = {*windows.ravel().tolist(), *dataset.train.labels[client.train].tolist()}
    assert len(client.validation) > 0
    assert not learned & set(dataset.train.labels[client.validation].tolist())
