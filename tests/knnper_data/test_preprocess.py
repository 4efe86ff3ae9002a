import torch

from knnper.data.examples import InputSpec
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
