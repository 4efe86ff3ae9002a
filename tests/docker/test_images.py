"""What can be known of the images without building them."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE_FILES = ("compose.yaml", "server/compose.yaml", "client/compose.yaml")
# Those of the images.
EXTRAS = ("deployment", "privacy", "service", "tables", "tracking")
SIMULATIONS_ONLY = {"ray"}
# What no image contains, by import name: Ray, charts, and everything for tests.
LEFT_OUT = ("ray", "matplotlib", "pytest", "hypothesis", "schemathesis", "playwright")


def tool(name: str) -> str:
    """Return a tool's path; skip without it."""
    found = shutil.which(name) or shutil.which(
        name, path=str(Path(sys.executable).parent)
    )
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def without_tags(document: str) -> Any:
    """Parse YAML without Compose's own tags."""
    return yaml.safe_load(re.sub(r"!(reset|override) ", "", document))


def image_requirements() -> set[str]:
    """Return the packages of both images."""
    folders = (DOCKER, DOCKER / "server", DOCKER / "client")
    text = "".join((folder / "requirements.txt").read_text() for folder in folders)
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    assert len(lines) == len(set(lines)), "a requirement is listed twice"
    return set(lines)


def names_in(lines: list[str]) -> set[str]:
    return {
        re.split(r"[\[<>=!~ ]", line)[0].lower().replace("_", "-") for line in lines
    }


def test_dockerfile_has_no_findings() -> None:
    done = subprocess.run(
        [tool("hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_compose_file_is_valid(file: str) -> None:
    words = ["--file", str(DOCKER / file), "--profile", "*", "config", "--quiet"]
    done = subprocess.run(
        [tool("docker-compose"), *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", COMPOSE_FILES[1:])
def test_containers_have_no_more_rights_than_they_need(file: str) -> None:
    services = without_tags((DOCKER / file).read_text())["services"]
    assert services
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"cpus", "mem_limit", "pids_limit"} <= service.keys(), name
        assert service["restart"] == "unless-stopped", name


@pytest.mark.parametrize(
    ("machine", "hidden", "upstream"),
    [
        ("server", "server", "https://server:8443"),
        ("client", "service", "http://service:8080"),
    ],
)
def test_proxy_stands_before_what_others_reach(
    machine: str, hidden: str, upstream: str
) -> None:
    document = without_tags((DOCKER / machine / "compose.yaml").read_text())
    published = {
        name: service["ports"]
        for name, service in document["services"].items()
        if "ports" in service
    }
    assert set(published) == {"proxy"}
    assert hidden in document["services"]["proxy"]["depends_on"]
    configuration = (DOCKER / machine / "nginx.conf").read_text()
    assert f"proxy_pass {upstream};" in configuration
    for limit in ("limit_conn", "client_header_timeout", "client_body_timeout"):
        assert re.search(rf"^ +{limit} ", configuration, re.MULTILINE), limit


def test_clients_reach_only_the_gateway() -> None:
    document = without_tags((DOCKER / "compose.yaml").read_text())
    assert document["networks"]["federation"] == {"internal": True}
    assert document["services"]["server"]["ports"] == []
    published = [
        port
        for name, service in document["services"].items()
        for port in service.get("ports", [])
    ]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len(set(published)) == len(published) == 4


def test_trial_has_the_clients_of_the_compose_file() -> None:
    values = runpy.run_path(str(DOCKER / "try.py"))
    services = without_tags((DOCKER / "compose.yaml").read_text())["services"]
    kinds, unseen = ("client", "service"), {f"service-{values['UNSEEN']}"}
    seen = {f"{kind}-{name}" for name in values["SEEN"] for kind in kinds}
    assert set(services) == {values["SERVER"]} | seen | unseen
    assert {name for name in services if "profiles" in services[name]} == unseen


def test_images_have_all_requirements_but_ray_in_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        line for name in EXTRAS for line in project["optional-dependencies"][name]
    ]
    required = names_in([*project["dependencies"], *extras]) - {"knnper"}
    assert image_requirements() == required - SIMULATIONS_ONLY
    pinned = names_in((ROOT / "constraints.txt").read_text().splitlines())
    assert required <= pinned


def test_images_run_as_a_user_without_rights() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    for target in ("server", "client"):
        stage = text.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert "\nUSER 10001:10001\n" in stage
        assert "\nHEALTHCHECK " in stage
    assert "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in text
    assert re.search(r"^ARG BASE=\S+:\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)


def test_readme_names_what_is_there() -> None:
    text = (DOCKER / "README.md").read_text()
    table = text.split("## ")[0]
    for file in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE):
        assert (DOCKER / file).exists(), file
    variables = set(re.findall(r"KNNPER_[A-Z]+", text))
    used = "".join((DOCKER / file).read_text() for file in COMPOSE_FILES)
    assert variables <= set(re.findall(r"KNNPER_[A-Z_]+", used))
    assert "10001" in text


@pytest.mark.slow
def test_a_federation_in_containers() -> None:
    done = subprocess.run([DOCKER / "try_offline.sh"], capture_output=True, text=True)
    if done.returncode == 77:  # UNABLE in try_offline.sh
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    assert "the story is complete" in done.stdout
