"""A model with another fingerprint than the server's: refused, and told later."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from knnper.client.doctor import client_checks
from knnper.client.runtime import Personalized
from knnper.client.settings import read_client
from knnper.client.site import installer_of
from knnper.loading import load_experiment
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import assemble
from knnper.strategies.core.exported_model import ModelError
from knnper.strategies.core.records import ModelPayload
from knnper.transport.diagnosis import Check, Finding, Verdict
from tests.client.state.small_site import SPEC, site

EXPERIMENT = {
    "name": "small",
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 2},
    "model": {"name": "tiny_cnn", "embedding_dim": 8},
    "method": {"name": "knn_per"},
}


def looked_at(checks: list[Check], subject: str) -> Finding:
    (check,) = (one for one in checks if one.subject == subject)
    return check.look()


def test_the_doctor_names_it(tmp_path: Path) -> None:
    config = tmp_path / "client.yaml"
    config.write_text(
        "name: site-a\nserver: 127.0.0.1:1\ninsecure: true\n"
        "data: {name: image_folder, path: data}\n"
    )
    settings = read_client(config)
    settings.state.mkdir()
    assembly = assemble(load_experiment(EXPERIMENT, experiment_catalogue()), SPEC)
    handed = ModelPayload(assembly.task.initial_weights)
    keep = installer_of(settings, assembly, site(), expected="0" * 64)
    with pytest.raises(ModelError, match="expected the model 000000000000"):
        keep(cast(Personalized, SimpleNamespace(reference=handed)))
    checks = list(client_checks(settings))
    finding = looked_at(checks, "refusals")
    assert finding.verdict is Verdict.PROBLEM
    assert "the server distributed: expected the model" in finding.found
    assert "install the same versions on both sides" in finding.mend
    # Nothing of it is installed.
    assert looked_at(checks, "model").verdict is Verdict.SKIPPED
