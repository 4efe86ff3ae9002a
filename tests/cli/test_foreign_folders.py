"""Commands with runs, models and stores that were made elsewhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from knnper.client.site_state import SiteState
from knnper.client.state import StateFolder, require_own
from knnper.experiment_file import load_experiment
from knnper.files import ForeignFileError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import (
    BatchIdentity,
    batch_folder,
)
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.interface import Run
from knnper.simulation.reports.finished_run import load_run
from knnper.simulation.trained_model import find_model, stored_model
from knnper.strategies.core.exported_model import save_model
from tests.client.state.small_site import small_experiment
from tests.datastore.small_store import small_store
from tests.foreign_files import PLANTS, content_of, make_victim, plant
from tests.processes import KNNPER
from tests.simulation.finished_run import finished_run

SECONDS = 60.0
RUN_ENTRIES = (
    *("results.json", "manifest.json", "rounds.jsonl", "clients.csv", ".lock"),
    *("personalization.jsonl", "checkpoints", "checkpoints/round-000002"),
    *(
        "checkpoints/round-000002/state.safetensors",
        "tensorboard",
        ".results.json.draft",
    ),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run, its exported model and a store."""
    folder = tmp_path_factory.mktemp("original")
    run = finished_run(folder)
    save_model(folder / "model", stored_model(run))
    with small_store(folder / "store") as store:
        store.save()
    return folder


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("entry", RUN_ENTRIES)
def test_a_run_with_something_foreign_is_refused(
    original: Path, entry: str, kind: str, tmp_path: Path
) -> None:
    run, victim = tmp_path / "run", make_victim(tmp_path / "victim")
    shutil.copytree(original / "run", run)
    plant(kind, run / entry, victim)
    before = content_of(victim)
    for opening in (RunFolder.open, Run, load_run, find_model, stored_model):
        with pytest.raises(ForeignFileError, match=f"{entry} is a "):
            opening(run)
    assert content_of(victim) == before


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("kind", PLANTS)
def test_overwriting_a_run_leaves_linked_files_alone(
    original: Path, kind: str, tmp_path: Path
) -> None:
    experiment = load_experiment(small_experiment(), experiment_catalogue())
    run, victim = tmp_path / "run", make_victim(tmp_path / "victim")
    before = content_of(victim)
    for entry in ("rounds.jsonl", "checkpoints", ".experiment.yaml.draft"):
        shutil.copytree(original / "run", run, dirs_exist_ok=True)
        plant(kind, run / entry, victim)
        RunFolder.create(run, experiment, overwrite=True)
        assert not (run / entry).exists()
    shutil.copytree(original / "run", run, dirs_exist_ok=True)
    plant(kind, run / ".lock", victim)
    with pytest.raises(ForeignFileError, match=r"\.lock is a "):
        RunFolder.create(run, experiment, overwrite=True)
    assert content_of(victim) == before


@pytest.mark.usefixtures("deadline")
def test_a_batch_with_something_foreign_is_refused(tmp_path: Path) -> None:
    identity, victim = BatchIdentity("sweep", "small"), make_victim(tmp_path / "victim")
    folder = tmp_path / "batch"
    with batch_folder(folder, identity):
        (folder / "runs").mkdir()
    for entry, kind in ((".batch.json", "pipe"), ("runs", "link_to_folder")):
        shutil.copytree(folder, tmp_path / kind)
        plant(kind, tmp_path / kind / entry, victim)
        with (
            pytest.raises(ForeignFileError, match=f"{entry} is a "),
            batch_folder(tmp_path / kind, identity),
        ):
            pass


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize(
    "entry", ["identity.json", "serving.json", "models", "next", "runs", "node.json"]
)
def test_a_clients_state_with_something_foreign_is_refused(
    entry: str, kind: str, tmp_path: Path
) -> None:
    state, victim = tmp_path / "state", make_victim(tmp_path / "victim")
    state.mkdir(mode=0o700)
    plant(kind, state / entry, victim)
    before = content_of(victim)
    with pytest.raises(ForeignFileError, match=f"{entry} is a "):
        SiteState(state, "site-a")
    with pytest.raises(ForeignFileError, match=f"{entry} is a "):
        require_own(StateFolder(state), "site-a", None)
    assert content_of(victim) == before


def test_a_clients_memory_may_lie_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "store").symlink_to(tmp_path / "disk")
    SiteState(tmp_path / "state", "site-a")


CLIENT = """\
name: site-a
server: localhost:8443
insecure: true
state: state
data: {name: image_folder, path: data}
"""
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("store/index", "link_to_folder", "store delete store --id 1 --yes"),
    ("store/index", "link_to_folder", "store rewrite store"),
    ("store/writer.lock", "link_to_file", "store rewrite store"),
    ("store/acknowledged.json", "link_to_file", "store rewrite store"),
    ("store/writer.lock", "pipe", "store info store"),
    ("store/acknowledged.json", "pipe", "store verify store"),
    ("store/store.sqlite3-wal", "pipe", "store verify store --json"),
    ("store/index/manifest.json", "pipe", "store rewrite store --to saved"),
    ("run/results.json", "pipe", "report run"),
    ("run/clients.csv", "pipe", "report run"),
    ("run/experiment.yaml", "pipe", "simulate --resume run"),
    ("run/manifest.json", "pipe", "simulate --resume run"),
    ("run/checkpoints", "link_to_folder", "simulate --resume run --from-round 1"),
    ("run/experiment.yaml", "pipe", "simulate demo --output run --overwrite"),
    ("run/results.json", "pipe", "fed export run exported"),
    ("run/results.json", "pipe", "fed status run"),
    ("model/model.json", "pipe", "site onboard client.yaml --model model"),
    ("model/model.safetensors", "pipe", "site check client.yaml --task model"),
    ("model/model.safetensors", "pipe", "store create new --model model"),
    ("state/identity.json", "pipe", "site onboard client.yaml --model model"),
    ("client.yaml", "pipe", "site check client.yaml"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "kind", "command"), COMMANDS)
def test_a_command_neither_hangs_nor_reaches_out(
    original: Path, entry: str, kind: str, command: str, tmp_path: Path
) -> None:
    folder, victim = tmp_path / "work", make_victim(tmp_path / "victim")
    shutil.copytree(original, folder)
    (folder / "state").mkdir(mode=0o700)
    (folder / "client.yaml").write_text(CLIENT)
    plant(kind, folder / entry, victim)
    before = content_of(victim)
    done = subprocess.run(
        [KNNPER, *command.split()],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert "Error: " in done.stderr
    assert content_of(victim) == before
