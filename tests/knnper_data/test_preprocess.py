import torch

from knnper.data.examples import InputSpec, no_examples
from knnper.data.preprocess import Normalizer


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


def test_nothing_is_of_the_type_of_the_rest() -> None:
    features = InputSpec((1, 1, 2), 2, (0.0, 0.0), (1.0, 1.0), dtype="float32")
    assert no_examples(features).images.dtype == torch.float32
    assert no_examples(features).images.shape == (0, 1, 1, 2)
    images = InputSpec((2, 2, 1), 2, (0.0,), (1.0,))
    assert no_examples(images).images.dtype == torch.uint8
