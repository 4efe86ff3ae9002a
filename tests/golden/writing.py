"""Write the folders and files that `tests/test_golden.py` opens.

    python -m tests.golden.writing ARCHIVE

Makes ARCHIVE.tar.xz with them, and ARCHIVE.json with what each holds when it is opened.
Those beside this file are not to be written anew: what users keep for years was written
by some version, and every later one must open it. If a format changes on purpose, write
an archive of the new one and keep the old.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from flwr.common.serde import recorddict_to_proto

from knnper.client.site_state import SiteState
from knnper.datastore.examples import NewExamples
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import create_store
from knnper.strategies.core.records import ModelUpdate
from knnper.transport.messages import Job, pack, to_content
from tests.client.state.small_site import NAME, site, small_model
from tests.datastore.small_store import SPEC, examples
from tests.golden.reading import PARTS, command, described_service

EXPERIMENT = {
    "name": "golden",
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": 5,
        "alpha": 0.5,
        "unseen_fraction": 0.2,
    },
    "model": {"name": "mlp", "hidden_sizes": [8, 6]},
    "training": {"num_rounds": 3, "batch_size": 32, "learning_rate": 0.1},
    "run": {"seed": 5, "engine": "serial"},
}
METHODS = {
    "run": {"name": "knn_per"},
    "stateful_run": {"name": "ditto", "prox_weights": [0.1]},
}
UPDATE = ModelUpdate(torch.arange(12, dtype=torch.float32) / 8 - 0.5, 37, 0.625)
JOB = Job(
    clients=["0007"],
    server_round=3,
    keep_rounds=[1, 2],
    experiment='{"name": "golden"}',
    session="a session",
    timeout_s=90.0,
    model="f" * 64,
    seen=False,
    state_rounds=[2],
)


def write_runs(folder: Path) -> None:
    """Write a finished run of kNN-Per, and one whose clients have a state."""
    for name, method in METHODS.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**EXPERIMENT, "method": method}))
        command("simulate", file, "--output", folder / name)
        file.unlink()
        shutil.rmtree(folder / name / "tensorboard")
        # On which machine it was made is nobody's business.
        for path in (folder / name / "manifest.json", folder / name / "results.json"):
            document = json.loads(path.read_text())
            manifest = document.get("manifest", document)
            manifest["platform"] = "Linux"
            manifest["command"] = ["knnper", "simulate", f"{name}.json"]
            path.write_text(json.dumps(document, indent=2))


def write_store(folder: Path) -> None:
    """Write a store with examples, of which one was deleted, and its index."""
    settings = StoreSettings(policy="fifo", capacity=40)
    with create_store(folder / "store", SPEC, 6, "model", settings) as store:
        drawn = examples(45)
        names = tuple(f"row {number}" for number in range(45))
        store.add(NewExamples(drawn.embeddings, drawn.labels, drawn.inputs, names))
        store.save()


def write_site(folder: Path) -> None:
    """Write the state of a site that pulled a model and serves it."""
    SiteState(folder / "site", NAME).install(small_model(), site(), took_part=False)


def write_message(folder: Path) -> None:
    """Write the content of a message with a job and an update."""
    content = to_content(JOB, {"update": pack(UPDATE)})
    (folder / "message.bin").write_bytes(
        recorddict_to_proto(content).SerializeToString()
    )


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an archive's member as nobody's."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main(archive: Path) -> None:
    """Write everything, and what is found in it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "written"
        folder.mkdir()
        write_runs(folder)
        command("fed", "export", folder / "run", folder / "model")
        write_store(folder)
        write_site(folder)
        write_message(folder)
        document = json.dumps(described_service(Path(place)))
        (folder / "openapi.json").write_text(document)
        with tarfile.open(f"{archive}.tar.xz", "w:xz") as file:
            file.add(folder, ".", filter=without_owner)
        found = {}
        for name, read in PARTS.items():
            copied = Path(place) / name
            shutil.copytree(folder, copied)
            found[name] = read(copied)
    Path(f"{archive}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
