import pytest
import torch

from knnper.data.examples import InputSpec, Normalizer, no_examples, normalizer
from knnper.errors import DataError

TEXT = InputSpec((1, 1, 3), num_classes=5, mean=(), std=(), dtype="token")


def test_channels_are_standardised_by_hand() -> None:
    spec = InputSpec((1, 2, 2), num_classes=2, mean=(0.2, 0.5), std=(0.4, 0.25))
    images = torch.tensor([[[[0, 255], [51, 0]]]], dtype=torch.uint8)
    before = images.clone()
    found = Normalizer(spec)(images)
    # 51 is 0.2 of 255: (0 - 0.2) / 0.4 and 0; (1 - 0.5) / 0.25 and -0.5 / 0.25.
    expected = torch.tensor([[[[-0.5, 0.0]], [[2.0, -2.0]]]])
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)


def test_features_are_not_scaled() -> None:
    spec = InputSpec((1, 1, 2), 2, mean=(3.0, -1.0), std=(2.0, 0.5), dtype="float32")
    rows = torch.tensor([[[[5.0, -1.0]]], [[[3.0, 0.0]]]])
    before = rows.clone()
    found = Normalizer(spec)(rows)
    expected = torch.tensor([[[[1.0]], [[0.0]]], [[[0.0]], [[2.0]]]])
    torch.testing.assert_close(found, expected)
    assert torch.equal(rows, before)


def test_ids_of_text_are_passed_on_as_they_are() -> None:
    windows = torch.tensor([[[[4, 0, 2]]], [[[1, 1, 3]]]], dtype=torch.uint8)
    found = normalizer(TEXT)(windows)
    assert found.dtype == torch.int64
    assert found.shape == (2, 3, 1, 1)
    assert found.flatten(1).tolist() == [[4, 0, 2], [1, 1, 3]]
    assert normalizer(TEXT)(windows[:0]).shape == (0, 3, 1, 1)


def test_an_id_of_no_character_is_refused() -> None:
    windows = torch.tensor([[[[4, 5, 2]]]], dtype=torch.uint8)
    message = r"found the id 5 in a text, expected ids from 0 to 4"
    with pytest.raises(DataError, match=message):
        normalizer(TEXT)(windows)


def test_nothing_is_of_the_type_of_the_rest() -> None:
    features = InputSpec((1, 1, 2), 2, (0.0, 0.0), (1.0, 1.0), dtype="float32")
    assert no_examples(features).images.dtype == torch.float32
    assert no_examples(features).images.shape == (0, 1, 1, 2)
    images = InputSpec((2, 2, 1), 2, (0.0,), (1.0,))
    assert no_examples(images).images.dtype == torch.uint8
    assert no_examples(TEXT).images.dtype == torch.uint8
    assert no_examples(TEXT).images.shape == (0, 1, 1, 3)
