import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.data.augmentation import (
    AUGMENTATIONS,
    FRAME,
    crop,
    flip,
    frame_of,
    require_augmentable,
)
from knnper.data.examples import InputSpec, no_examples
from knnper.data.normalization import Normalizer, channel_statistics, normalizer
from knnper.errors import ConfigError, DataError
from knnper.experiment import Augmentation
from knnper.seeding import RandomKey

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
    windows[0, 0, 0, 1] = 5
    with pytest.raises(DataError, match="found the id 5 in a text, expected ids"):
        normalizer(TEXT)(windows)


def test_nothing_is_of_the_type_of_the_rest() -> None:
    features = InputSpec((1, 1, 2), 2, (0.0, 0.0), (1.0, 1.0), dtype="float32")
    images = InputSpec((2, 2, 1), 2, (0.0,), (1.0,))
    specs = {features: torch.float32, images: torch.uint8, TEXT: torch.uint8}
    for spec, dtype in specs.items():
        none = no_examples(spec).images
        assert (none.dtype, none.shape) == (dtype, (0, *spec.image_shape))


def test_statistics_match_their_definition() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5000, 2, 3, 3), dtype=np.uint8)
    mean, std = channel_statistics([images[:1000], images[1000:]])
    scaled = images / 255.0
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std(axis=(0, 1, 2)), rtol=1e-12)
    # A constant channel can be divided by.
    mean, std = channel_statistics([np.full((3, 2, 2, 1), 51, dtype=np.uint8)])
    assert mean == pytest.approx([0.2])
    assert std == (1.0,)


def test_pixels_are_not_widened_all_at_once() -> None:
    images = np.zeros((4, 2048, 2048, 1), dtype=np.uint8)
    images[0, :1024] = 255
    tracemalloc.start()
    mean, _ = channel_statistics([images])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mean == pytest.approx([0.125])
    assert most < 2 * images.nbytes


SIDES = st.integers(1, 7)


def numbered(num_images: int, height: int, width: int, channels: int = 2) -> Tensor:
    """Return images whose pixels differ from each other and from black."""
    numbers = torch.arange(num_images * height * width * channels) % 255 + 1
    shape = (num_images, height, width, channels)
    return numbers.to(torch.uint8).reshape(shape)


def brute_force_crop(image: Tensor, top: int, left: int) -> Tensor:
    """Return the image seen through a window that is moved from its place."""
    height, width, _ = image.shape
    seen = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y = row + top - min(4, height - 1)
            x = column + left - min(4, width - 1)
            if 0 <= y < height and 0 <= x < width:
                seen[row, column] = image[y, x]
    return seen


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_images=st.integers(0, 4), height=SIDES, width=SIDES)
def test_crops_are_those_of_a_loop_over_pixels(
    data: st.DataObject, num_images: int, height: int, width: int
) -> None:
    def places(side: int) -> Tensor:
        place = st.integers(0, 2 * frame_of(side))
        drawn = data.draw(st.lists(place, min_size=num_images, max_size=num_images))
        return torch.tensor(drawn, dtype=torch.int64)

    images = numbered(num_images, height, width)
    tops, lefts = places(height), places(width)
    found = crop(images, tops, lefts)
    assert found.shape == images.shape
    for image, top, left, seen in zip(images, tops, lefts, found, strict=True):
        assert torch.equal(seen, brute_force_crop(image, int(top), int(left)))


@settings(max_examples=30, deadline=None)
@given(mirrored=st.lists(st.booleans(), max_size=5), height=SIDES, width=SIDES)
def test_flips_are_those_of_a_loop(
    mirrored: list[bool], height: int, width: int
) -> None:
    images = numbered(len(mirrored), height, width)
    found = flip(images, torch.tensor(mirrored, dtype=torch.bool))
    assert found.shape == images.shape
    for image, turned, seen in zip(images, mirrored, found, strict=True):
        columns = range(width - 1, -1, -1) if turned else range(width)
        expected = torch.stack([image[:, column] for column in columns], dim=1)
        assert torch.equal(seen, expected)


def test_every_place_and_both_directions_occur() -> None:
    images = torch.zeros((2000, 9, 9, 1), dtype=torch.uint8)
    images[:, 4, 4] = 255  # the middle, which a crop moves by up to the frame's width
    found = AUGMENTATIONS["crop_flip"](images, RandomKey(1).numpy())
    _, rows, columns, _ = found.nonzero(as_tuple=True)
    assert len(rows) == len(images)
    for places in (rows, columns):
        counts = torch.bincount(places, minlength=2 * FRAME + 1)
        assert len(counts) == 2 * FRAME + 1
        # 2000 / 9 = 222 expected, with a standard deviation of 14.
        assert int(counts.min()) > 150
        assert int(counts.max()) < 300

    edge = torch.zeros((2000, 1, 3, 1), dtype=torch.uint8)
    edge[:, :, 0] = 255
    flipped = AUGMENTATIONS["flip"](edge, RandomKey(1).numpy())
    # 1000 expected, with a standard deviation of 22.
    assert 890 < int((flipped[:, 0, 2, 0] == 255).sum()) < 1110


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_generator_alone_decides_and_the_images_stay(name: Augmentation) -> None:
    images = numbered(6, 8, 6)
    before = images.clone()
    first = AUGMENTATIONS[name](images, np.random.Generator(np.random.PCG64(3)))
    second = AUGMENTATIONS[name](images, np.random.Generator(np.random.PCG64(3)))
    assert torch.equal(first, second)
    assert torch.equal(images, before)
    assert torch.equal(first, images) is (name == "none")
    assert first.dtype == torch.uint8
    # Channels stay innermost, as convolutions want them.
    assert first.is_contiguous()


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_only_images_are_changed_at_random(name: Augmentation) -> None:
    require_augmentable(name, InputSpec((8, 8, 1), 2, (0.0,), (1.0,)))
    features = InputSpec((1, 1, 1), 2, (0.0,), (1.0,), dtype="float32")
    if name == "none":
        require_augmentable(name, features)
        return
    message = rf"training.augmentation: found '{name}', but the inputs are rows of"
    with pytest.raises(ConfigError, match=message):
        require_augmentable(name, features)
