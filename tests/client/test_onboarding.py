"""What a model may have been trained on."""

from pathlib import Path

import numpy as np
import pytest

from knnper.client.onboarding import onboard
from knnper.client.settings import read_client
from tests.client.state.small_site import site, small_model


@pytest.mark.parametrize(
    ("train", "said", "assumed"),
    [
        ("true", None, True),
        ("false", None, False),
        ("true", False, False),
        ("false", True, True),
    ],
)
def test_a_site_that_trains_is_taken_as_trained_on(
    tmp_path: Path, train: str, said: bool | None, assumed: bool
) -> None:
    data = site(12, 0)
    images, labels = data.train.examples.images, data.train.examples.labels
    np.savez(tmp_path / "site.npz", inputs=images.numpy(), labels=labels.numpy())
    file = tmp_path / "client.yaml"
    file.write_text(
        f"name: site-a\nserver: nowhere.invalid:1\ninsecure: true\ntrain: {train}\n"
        "data: {name: npz, path: site.npz}\n"
    )
    found = onboard(read_client(file), small_model(), took_part=said)
    assert found.took_part is assumed
    measured_on = found.serving.expected_gain.num_examples
    kept = found.serving.num_train + found.serving.num_validation
    assert measured_on == (found.serving.num_validation if assumed else kept)
