"""Settings of the kinds: ranges, and what they say to a store."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from knnper.datastore.index import (
    INDEX_KINDS,
    IndexSettings,
    ListsSettings,
    ProductSettings,
)
from knnper.errors import ConfigError
from tests.datastore.index.index_cases import clustered

parse: TypeAdapter[IndexSettings] = TypeAdapter(IndexSettings)


@pytest.mark.parametrize("name", INDEX_KINDS)
def test_a_name_is_enough(name: str) -> None:
    settings = parse.validate_json(json.dumps({"name": name}))
    assert settings == INDEX_KINDS[name]()
    assert settings.name == name


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"name": "lsh"}, "does not match any of the expected tags"),
        ({"name": "flat", "rerank": 2}, "rerank"),
        ({"name": "sq8", "rerank": -1}, "rerank"),
        ({"name": "pq", "num_bits": 3}, "num_bits"),
        ({"name": "pq", "num_bits": 9}, "num_bits"),
        ({"name": "pq", "num_parts": 0}, "num_parts"),
        ({"name": "hnsw", "num_links": 1}, "num_links"),
        ({"name": "hnsw", "ef_search": 0}, "ef_search"),
        ({"name": "hnsw", "ef_construction": 1.5}, "ef_construction"),
        ({"name": "ivf", "num_lists": 0}, "num_lists"),
        ({"name": "ivf", "num_probes": "all"}, "num_probes"),
    ],
)
def test_what_makes_no_sense_is_refused(document: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=place):
        parse.validate_json(json.dumps(document))


def test_bytes_of_a_vector() -> None:
    sizes = {name: kind().code_bytes(512) for name, kind in INDEX_KINDS.items()}
    assert sizes == {
        "flat": 2048,
        "fp16": 1024,
        "sq8": 512,
        "pq": 64,
        "hnsw": 2176,
        "ivf": 2056,
    }


@pytest.mark.parametrize(
    ("dim", "expected"), [(512, 64), (1280, 160), (20, 2), (7, 1), (37, 1), (1, 1)]
)
def test_parts_divide_the_embedding(dim: int, expected: int) -> None:
    assert ProductSettings().parts_of(dim) == expected


def test_bits_are_packed() -> None:
    assert ProductSettings(num_parts=3, num_bits=5).code_bytes(12) == 2


def test_parts_that_do_not_divide_are_refused() -> None:
    settings, vectors = ProductSettings(num_parts=5), clustered(3)
    with pytest.raises(ConfigError, match=r"found 5, .*divide 8.*one of 1, 2, 4, 8"):
        settings.build(8, vectors.argsort()[0][:3], vectors)


@pytest.mark.parametrize(
    ("settings", "num_vectors", "expected"),
    [
        (ListsSettings(), 0, 1),
        (ListsSettings(), 1599, 1),
        (ListsSettings(), 1600, 40),
        (ListsSettings(), 50_000, 224),
        (ListsSettings(num_lists=10), 399, 1),
        (ListsSettings(num_lists=10), 400, 10),
    ],
)
def test_lists_have_forty_vectors(
    settings: ListsSettings, num_vectors: int, expected: int
) -> None:
    assert settings.lists_for(num_vectors) == expected


def test_an_eighth_of_the_lists_is_probed() -> None:
    assert [ListsSettings().probes_for(lists) for lists in (1, 40, 224)] == [1, 8, 28]
    assert ListsSettings(num_probes=3).probes_for(224) == 3
    assert ListsSettings(num_probes=300).probes_for(224) == 224
