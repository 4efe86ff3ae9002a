"""Waiting until another process of the client has something to serve."""

import threading
from pathlib import Path

import numpy as np
import pytest

from knnper.client.onboarding import onboard, wait_until_installed
from knnper.client.settings import read_client
from knnper.client.state import ResidenceError
from tests.client.residence.small_site import new_residence, site, small_model


def test_what_is_installed_meanwhile_is_found(tmp_path: Path) -> None:
    residence, model = new_residence(tmp_path), small_model()
    later = threading.Timer(
        0.3, lambda: residence.install(model, site(3, 2), took_part=False)
    )
    later.start()
    found = wait_until_installed(residence, patience_s=30)
    later.join()
    assert found.serving == residence.served()
    assert found.serving.model == model.fingerprint


def test_the_wait_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(ResidenceError, match=r"within 0.1 seconds; look into the log"):
        wait_until_installed(new_residence(tmp_path), patience_s=0.1)


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
