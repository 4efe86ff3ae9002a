"""What errors of a site leave at the server, with real processes: no private value."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.apps.data_faults import (
    CLASSES,
    COLUMNS,
    FAULTS,
    NAME,
    NUMBER,
    code,
)
from tests.federation.small_federation import Example, Federation, found_federation
from tests.processes import Commands

pytestmark = pytest.mark.slow
GOOD, FAULTY = "site-a", "site-b"
EXPERIMENT: dict[str, Any] = {
    "name": "rows",
    "data": {
        "name": "sites",
        "image_shape": [1, 1, 2],
        "class_names": list(CLASSES),
        "mean": [0, 0],
        "std": [1, 1],
        "dtype": "float32",
        "feature_names": list(COLUMNS),
    },
    "partition": {"name": "sites"},
    "model": {"name": "mlp"},
    "training": {"num_rounds": 1, "batch_size": 8},
    "method": {"name": "knn_per"},
    "run": {"seed": 0, "max_failed_fraction": 0.5},
}
# Reads rows when the site introduces itself, and fails in each message after that.
LATER = f"""import pathlib
import numpy

def read(base):
    count = base / "count"
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    if len(count.read_text()) > 1:
        raise type(NAME, (ValueError,), {{}})(f"{NAME} has {NUMBER}")
    return {{"inputs": numpy.ones((80, 2)), "labels": ["none", "HIV"] * 40}}
"""


@pytest.fixture
def federation(tmp_path: Path, commands: Commands) -> Federation:
    example = Example(tmp_path / "example", EXPERIMENT)
    example.shares.mkdir(parents=True)
    example.file.write_text(yaml.safe_dump(EXPERIMENT))
    inputs, labels = np.random.default_rng(0).normal(size=(80, 2)), [*CLASSES] * 40
    for name in (GOOD, FAULTY):
        np.savez(example.shares / f"{name}.npz", inputs=inputs, labels=labels)
    place = tmp_path / "fed"
    return found_federation(place, example, commands, clients=[GOOD, FAULTY])


def test_server_keeps_no_private_value_of_errors(federation: Federation) -> None:
    server = federation.server()
    nodes = {name: federation.client(name) for name in (GOOD, FAULTY)}
    for node in nodes.values():
        node.wait_for("in the federation of")
    folder = federation.client_folder(FAULTY)
    for name in (
        "row_with_a_comma_too_many",
        "the_same_id_twice",
        "npz_that_does_not_exist",
        "code_that_raises_an_error_named_like_a_row",
    ):
        federation.configure(FAULTY, data=FAULTS[name].write(folder))
        waiting = ("min_clients=2", "wait_for_clients_s=4")
        submitted, run = federation.submit(
            *(f"run.federation.{one}" for one in waiting)
        )
        assert submitted.wait() != 0
        assert f"({FAULTS[name].code})" in submitted.written
        shutil.rmtree(run.folder, ignore_errors=True)
    federation.configure(FAULTY, data=code(folder, LATER))
    submitted, run = federation.submit()
    assert submitted.wait() == 0
    assert "(own_code_failed)" in run.rounds[0]["failures"][FAULTY]
    assert set(run.clients) == {GOOD}
    assert f"client {FAULTY} could not personalise: " in federation.run_log
    for value in (NAME, NUMBER):
        assert value in nodes[FAULTY].written, "its own log has the details"
        for log in (server.written, submitted.written, federation.run_log):
            assert value not in log
        for root in (federation.folder / "server", run.folder):
            files = [path for path in root.rglob("*") if path.is_file()]
            assert files
            assert not [path for path in files if value.encode() in path.read_bytes()]
