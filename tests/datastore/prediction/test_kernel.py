"""Both kernels against numbers computed by hand."""

import pytest
import torch

from knnper.datastore.prediction import KERNELS, KernelName

SQUARED_DISTANCES = torch.tensor(
    [[0.0, 4.0, 25.0], [1e12, 1e36, 1e80]], dtype=torch.float64
)


@pytest.mark.parametrize(
    ("name", "kernel_scale", "expected"),
    [
        ("paper", 1.0, [[0.0, -2.0, -5.0], [-1e6, -1e18, -1e40]]),
        ("paper", 0.5, [[0.0, -4.0, -10.0], [-2e6, -2e18, -2e40]]),
        ("squared", 1.0, [[0.0, -0.5, -3.125], [-1.25e11, -1.25e35, -1.25e79]]),
        ("squared", 0.25, [[0.0, -2.0, -12.5], [-5e11, -5e35, -5e79]]),
    ],
)
def test_log_weights_by_hand(
    name: KernelName, kernel_scale: float, expected: list[list[float]]
) -> None:
    found = KERNELS[name](SQUARED_DISTANCES, kernel_scale, 8)

    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_there_are_two_kernels() -> None:
    assert KERNELS.keys() == {"paper", "squared"}
