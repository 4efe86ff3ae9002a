import tracemalloc

import numpy as np
import pytest

from knnper.data.examples import channel_statistics


def test_matches_the_definition() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5000, 2, 3, 3), dtype=np.uint8)
    mean, std = channel_statistics([images[:1000], images[1000:]])
    scaled = images / 255.0
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std(axis=(0, 1, 2)), rtol=1e-12)


def test_hand_computed() -> None:
    images = np.array([0, 255, 255, 255], dtype=np.uint8).reshape(2, 2, 1, 1)
    mean, std = channel_statistics([images])
    assert mean == pytest.approx([0.75])
    assert std == pytest.approx([np.sqrt(3) / 4])


def test_a_constant_channel_can_be_divided_by() -> None:
    images = np.full((3, 2, 2, 1), 51, dtype=np.uint8)
    mean, std = channel_statistics([images])
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
