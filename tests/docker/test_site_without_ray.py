"""A site and a server where Ray is not installed, as in their images."""

import json
import os
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.cli.conftest import make_run, write_client_file
from tests.docker.test_images import LEFT_OUT
from tests.fresh_process import run_fresh
from tests.processes import LOCALHOST, Commands, free_port, wait_until

SITES_ONLY = ("sklearn", "pyarrow")  # in the image of a site, not of a server
BLOCK = f"import sys\nfor name in {LEFT_OUT}: sys.modules[name] = None\n"
BLOCK_MORE = f"for name in {SITES_ONLY}: sys.modules[name] = None\n"
IMPORT_ALL = """
import importlib, pkgutil
for folder in ("cli", "client", "server"):
    package = importlib.import_module(f"knnper.{folder}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
# What the commands and apps of a site and a server import when they run.
from knnper.cli.flower_apps import client_app, server_app
from knnper.simulation.trained_model import find_model
from knnper.simulation.workbench import open_workbench
"""
COMPUTE_METRICS = """
import numpy as np
from knnper.metrics import auroc, balanced_accuracy, macro_f1
labels, probabilities = np.array([0, 1]), np.eye(2)
assert auroc(labels, probabilities) == 1
assert balanced_accuracy(labels, probabilities) == 1
assert macro_f1(labels, probabilities) == 1
"""


def test_server_client_and_commands_import(tmp_path: Path) -> None:
    done = run_fresh(BLOCK + BLOCK_MORE + IMPORT_ALL, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
def test_a_site_can_compute_the_metrics(tmp_path: Path) -> None:
    done = run_fresh(BLOCK + COMPUTE_METRICS, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
def test_a_site_is_checked_onboarded_and_served(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", seed=1)
    port = f"service: {{port: {free_port()}}}"
    client_file = write_client_file(tmp_path, more=port)
    # Python runs this file first in each process, also in those that a command starts.
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCK)
    path = f"{tmp_path / 'blocked'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    code = "from knnper.cli.app import main; main()"
    site = (sys.executable, "-c", code, "site")
    with Commands(tmp_path / "logs", {"PYTHONPATH": path}) as commands:
        commands.run("check", *site, "check", client_file)
        model = ("--model", run, "--no-serve")
        commands.run("onboard", *site, "onboard", client_file, *model)
        commands.run("refresh", *site, "refresh", client_file)
        token = commands.run("token", *site, "token", "add", client_file, "me")
        serving = commands.start("serve", [*site, "serve", client_file])
        address = serving.wait_for(rf"serves at (http://{LOCALHOST}:\d+)")
        with httpx.Client(base_url=address) as http:
            wait_until(lambda: http.get("/ready").is_success)
            answer = http.post(
                "/predict",
                json={"inputs": np.zeros((1, 8, 8, 1)).tolist()},
                headers={"Authorization": f"Bearer {token.split()[-1]}"},
            )
        assert answer.is_success, answer.text
        assert len(json.loads(answer.text)["predictions"]) == 1
        assert serving.stop() == 0, serving.written
