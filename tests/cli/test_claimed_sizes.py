"""Sizes that files only claim, as commands meet them: no memory is taken for them."""

import io
import json
import resource
import shutil
import subprocess
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from knnper.datastore.examples import InputLayout
from knnper.simulation.trained_model import stored_model
from knnper.strategies.core.exported_model import DESCRIPTION, save_model
from tests.datastore.small_store import IMAGES, small_store
from tests.datastore.test_foreign_store import forge
from tests.knnper_data.test_stated_sizes import npy
from tests.processes import KNNPER
from tests.simulation.finished_run import finished_run

pytestmark = pytest.mark.slow

CLIENT = """\
name: site-a
server: localhost:8443
insecure: true
state: state
data: {name: npz, path: data.npz}
"""
COMMANDS = {
    "site check client.yaml": "data.npz cannot be read as .npz",
    "site onboard client.yaml --model model": "data.npz cannot be read as .npz",
    "store export store out.npz": "example 1 in table inputs is not what was written",
    "site check client.yaml --task forged": "found inputs of shape (1000000, 1000000",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of sound and of forged files, which are all small."""
    folder = tmp_path_factory.mktemp("original")
    save_model(folder / "model", stored_model(finished_run(folder)))
    shutil.copytree(folder / "model", folder / "forged")
    document = json.loads((folder / "forged" / DESCRIPTION).read_text())
    document["card"]["spec"]["image_shape"] = [10**6, 10**6, 1]
    (folder / "forged" / DESCRIPTION).write_text(json.dumps(document))
    with small_store(folder / "store") as store:
        store.save()
    spec = replace(IMAGES, input=InputLayout((10**6, 10**6, 10**3)))
    forge(folder / "store", spec=json.dumps(asdict(spec)))
    (folder / "client.yaml").write_text(CLIENT)
    labels = io.BytesIO()
    np.save(labels, np.arange(4) % 2)
    with zipfile.ZipFile(folder / "data.npz", "w") as archive:
        for split in ("train", "validation", "test"):
            inputs = npy((4, 10**5, 10**4, 3), num_bytes=48)
            archive.writestr(f"{split}_inputs.npy", inputs)
            archive.writestr(f"{split}_labels.npy", labels.getvalue())
    return folder


def limited() -> None:
    """Let the process have 8 GB, at most."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_takes_no_memory_for_a_claimed_size(
    original: Path, command: str, tmp_path: Path
) -> None:
    shutil.copytree(original, tmp_path / "work")
    ended = subprocess.run(
        [KNNPER, *command.split()],
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=limited,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert COMMANDS[command] in ended.stderr
