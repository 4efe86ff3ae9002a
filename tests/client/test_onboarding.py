"""Waiting until another process of the client has something to serve."""

import threading
from pathlib import Path

import pytest

from client.onboarding import wait_until_installed
from client.residence.errors import ResidenceError
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
