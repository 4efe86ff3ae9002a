import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.errors import CodecError
from knnper.records import (
    Flat,
    Parts,
    canonical,
    fingerprint,
    flatten,
    put_together,
    take_apart,
    unflatten,
)
from knnper.strategies.core.records import ModelPayload, ModelUpdate, Record


@dataclass(frozen=True)
class Inner(Record):
    values: Tensor
    note: str


@dataclass(frozen=True)
class Outer(Record):
    components: tuple[Tensor, ...]
    inner: Inner | None
    named: dict[str, Tensor]
    rate: float
    count: int


def outer(rate: float = 0.1) -> Outer:
    return Outer(
        components=(torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])),
        inner=Inner(torch.arange(6.0).view(2, 3), "ü"),
        named={"b": torch.tensor(7.0), "empty": torch.empty((0, 3))},
        rate=rate,
        count=3,
    )


def test_a_record_is_one_vector_in_field_order() -> None:
    names = ["components/0", "components/1", "inner/values", "named/b", "named/empty"]
    assert list(take_apart(outer()).tensors) == names
    assert flatten(outer()).vector.tolist() == [1, 2, 3, 0, 1, 2, 3, 4, 5, 7]


@given(st.floats(allow_nan=False))
def test_a_record_comes_back_bit_for_bit(rate: float) -> None:
    back = unflatten(Outer, flatten(outer(rate)))
    assert back.rate == rate
    assert fingerprint(back) == fingerprint(outer(rate))
    assert back.inner is not None
    assert back.inner.values.shape == (2, 3)
    assert back.named["empty"].shape == (0, 3)


def test_layout_and_place_in_memory_do_not_travel() -> None:
    sideways = ModelPayload(torch.arange(12.0).view(3, 4)[:, 1:].T)
    expected = fingerprint(sideways)
    for copied in (canonical(sideways), unflatten(ModelPayload, flatten(sideways))):
        assert fingerprint(copied) == expected
        assert copied.weights.is_contiguous()
        assert copied.weights.storage_offset() == 0


def test_the_fingerprint_sees_every_bit() -> None:
    one = ModelPayload(torch.tensor([0.0, 1.0]))
    other = ModelPayload(torch.tensor([-0.0, 1.0]))
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(ModelPayload(torch.tensor([0.0, 1.0])))


@dataclass(frozen=True)
class Strange:
    path: object


FLAT = flatten(ModelPayload(torch.ones(3)))
EMPTY, SHORT, LONG = (Flat(torch.ones(one), FLAT.layout) for one in (0, 2, 4))
RENAMED = FLAT.layout.replace('"weights":{', '"biases":{')
NO_TENSORS = Parts({}, take_apart(ModelPayload(torch.ones(3))).structure)
NUMBERS = ModelPayload(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: unflatten(ModelUpdate, FLAT), "found a ModelPayload"),
        (lambda: unflatten(ModelPayload, Flat(FLAT.vector, RENAMED)), "different vers"),
        (lambda: unflatten(ModelPayload, Flat(torch.ones(3), "{")), "expected JSON"),
        (lambda: put_together(ModelPayload, NO_TENSORS), "'weights' is missing"),
        (lambda: flatten(NUMBERS), r"weights: expected float32, found torch\.int"),
        (lambda: flatten(Strange({1})), "path: a set cannot be sent"),
        (lambda: unflatten(ModelPayload, EMPTY), "an array of 3 numbers, found 0"),
        (lambda: unflatten(ModelPayload, SHORT), "an array of 3 numbers, found 2"),
        (lambda: unflatten(ModelPayload, LONG), "an array of 3 numbers, found 4"),
    ],
)
def test_what_is_no_such_record_is_refused(
    attempt: Callable[[], object], message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        attempt()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


PLACES = ("structure", "shapes", "fields", "components", "inner", "named", "count")


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from(PLACES))
def test_a_layout_with_anything_anywhere_is_a_record_or_an_error(
    anything: object, place: str
) -> None:
    flat = flatten(outer())
    layout = json.loads(flat.layout)
    inside = layout if place in layout else layout["structure"]
    inside = inside if place in inside else inside["fields"]
    inside[place] = anything
    try:
        back = unflatten(Outer, Flat(flat.vector, json.dumps(layout)))
    except CodecError:
        return
    assert (place, type(back.count)) == ("count", int)
