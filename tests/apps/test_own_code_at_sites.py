"""Users' code and weights of others in a federation: nothing of them is sent."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import save_file

from knnper.cli.flower_apps import Order, client_app, lead_sites, order_of
from knnper.client.limits import Limits
from knnper.client.onboarding import onboard
from knnper.client.served_model import open_served
from knnper.client.settings import read_client
from knnper.client.site import SiteNode, site_experiment
from knnper.client.site_state import SiteState
from knnper.errors import ConfigError, OwnCodeError
from knnper.experiment import Experiment
from knnper.models import with_local_files
from knnper.own import CLOSED, LOCAL_VARIABLE, Door, local_door
from knnper.pretrained import TransformersSettings
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.settings import Choice
from knnper.simulation.catalogue import over_sites
from knnper.simulation.trained_model import find_model, stored_model, trained_model
from knnper.simulation.workbench import open_workbench
from knnper.strategies.catalogue import for_sites, identity_at_sites
from knnper.strategies.core.exported_model import (
    StoredModel,
    fingerprint_of,
    load_model,
    save_model,
)
from knnper.transport.messages import (
    Introduction,
    Job,
    Purpose,
    pack,
    read_introduction,
    to_content,
)
from tests.apps.site_grid import (
    SiteGrid,
    experiment,
    make_sites,
    own_experiment,
    simulated,
)
from tests.own.import_path import clean_import_path

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("inside_a_run", "own_modules"),
]
CODE = """
from torch import nn
from knnper.strategies.core.method import Method

class Net(nn.Module):
    def __init__(self, num_classes: int, hidden: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.out(self.body(x))

def smoothed(logits, labels, amount: float = 0.1):
    return nn.functional.cross_entropy(logits, labels, label_smoothing=amount)

def failing(logits, labels):
    raise ValueError(f"a secret: {labels.tolist()}")

class Same(Method):
    title = "Same as FedAvg"
    ends_with_global_model = True

import torch

class Viewing(nn.Module):
    # It needs contiguous images, and assigns a buffer.
    def __init__(self, num_classes: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(144, num_classes)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.out(self.conv(x - self.mean).relu().view(-1, 144))
"""
OWN = {
    "model": "{name: 'mine:Net', hidden: 8}",
    "method": "{name: 'mine:Same'}",
    "personalization": "{name: knn}",
    "training.loss": "{name: 'mine:smoothed', amount: 0.2}",
    "training.optimizer": "{name: 'torch.optim:NAdam'}",
    "training.learning_rate": 0.01,
}
ALLOWED = "own_code:\n  folder: code\n  allowed: [{}]\n".format(
    ", ".join(
        f"'{one}'"
        for one in (
            *("mine:Net", "mine:Same", "mine:smoothed", "mine:failing"),
            *("mine:Viewing", "torch.optim:NAdam"),
        )
    )
)
SEEN = ("0000", "0001", "0003")


@pytest.fixture
def own_modules() -> Iterator[None]:
    with clean_import_path("mine"):
        yield


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for name in ("server", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(CODE)
    return tmp_path / "server"


def append(files: dict[str, Path], text: str) -> None:
    for file in files.values():
        file.write_text(file.read_text() + text)


def lead(files: dict[str, Path], settings: Experiment, output: Path) -> RunFolder:
    grid = SiteGrid({10 + place: files[name] for place, name in enumerate(SEEN)})
    made = Order(over_sites(settings), output, False, False, None)
    return lead_sites(grid, made, Observer())  # type: ignore[arg-type]


def digest(run: RunFolder) -> str:
    return str(run.results()["training"]["state_sha256"])


def context_of(file: Path) -> Context:
    return Context(1, 1, {"config": str(file)}, RecordDict(), {})


def introduced(file: Path, text: str) -> Introduction:
    job = Job([file.stem], 1, [0], text)
    return read_introduction(SiteNode().introduce(context_of(file), job))


@pytest.mark.parametrize("network", [OWN["model"], "{name: 'mine:Viewing'}"])
def test_three_sites_train_what_a_simulation_does_and_a_fourth_serves_it(
    tmp_path: Path, code: Path, network: str
) -> None:
    settings = own_experiment(code, {**OWN, "model": network})
    files = make_sites(tmp_path, settings)
    append(files, ALLOWED)
    run = lead(files, settings, tmp_path / "run")
    assert digest(run) == digest(simulated(tmp_path / "serial", settings))
    # What is exported holds no code, and is used through a site's own door alone.
    stored = stored_model(run.path)
    save_model(tmp_path / "exported", stored)
    with pytest.raises(OwnCodeError, match="which may not be used here"):
        find_model(tmp_path / "exported")
    assert find_model(run.path).fingerprint == stored.fingerprint
    new = read_client(files["0002"])
    model = find_model(tmp_path / "exported", new.door)
    onboard(new, model, took_part=False)
    with open_served(SiteState(new.state, new.name, door=new.door)) as served:
        image = torch.zeros((1, *model.spec.image_shape), dtype=torch.uint8)
        assert served.predict(image).probabilities.shape == (1, 10)


def test_a_model_from_elsewhere_comes_through_a_file_that_is_named(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = own_experiment(code, OWN)
    trained = find_model(simulated(tmp_path / "run", settings).path)
    save_model(tmp_path / "exported", trained)
    (tmp_path / "local.yaml").write_text(ALLOWED)
    monkeypatch.setenv(LOCAL_VARIABLE, str(tmp_path / "local.yaml"))
    found = find_model(tmp_path / "exported")
    image = torch.zeros((2, *found.spec.image_shape), dtype=torch.uint8)
    assert torch.equal(found.embed(image), trained.embed(image))
    (tmp_path / "code" / "mine.py").write_text(CODE + "\n# changed\n")
    with pytest.raises(OwnCodeError, match=r"code/mine.py, .* bring the same files"):
        find_model(tmp_path / "exported")
    (tmp_path / "local.yaml").write_text("own_cod: {}\n")
    with pytest.raises(ConfigError, match="did you mean 'own_code'"):
        local_door()


def test_a_site_without_leave_or_with_other_code_refuses(
    tmp_path: Path, code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = over_sites(own_experiment(code, OWN))
    file = make_sites(tmp_path, experiment())["0000"]
    text = for_sites(settings)
    assert str(tmp_path) not in text
    problem = introduced(file, text).problem
    assert problem.count("(own_code_not_allowed)") == 1
    assert "'mine:Net', which may not be used here" in caplog.text
    assert "own_code: {folder: FOLDER, allowed: [mine:Net]}" in caplog.text
    append({"": file}, ALLOWED)
    assert introduced(file, text).problem == ""
    (tmp_path / "code" / "mine.py").write_text(CODE.replace("ReLU", "GELU"))
    problem = introduced(file, text).problem
    assert "(own_code_differs)" in problem
    assert "mine:Net differs on this machine" in caplog.text
    assert "torch.optim:NAdam differs on this machine" not in caplog.text
    (tmp_path / "code" / "mine.py").write_text("raise KeyError('a secret')")
    problem = introduced(file, text).problem
    assert "line 1 of a user's code failed with KeyError (own_code_failed)" in problem
    assert "a secret" not in problem
    assert "a secret" in caplog.text


def test_what_fails_in_users_code_is_told_without_what_it_says(
    tmp_path: Path, code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = over_sites(
        own_experiment(code, {**OWN, "training.loss": "'mine:failing'"})
    )
    file = make_sites(tmp_path, experiment())["0000"]
    append({"": file}, ALLOWED)
    bench = open_workbench(own_experiment(code, OWN))
    payload = bench.method.broadcast(
        bench.method.init(["0000"], RandomKey(0)), "0000", RandomKey(0)
    )
    job = Job(["0000"], 1, [0], for_sites(settings), state_rounds=[0])
    content = to_content(job, {"payload": pack(payload)})
    message = Message(content, dst_node_id=1, message_type=Purpose.TRAIN.value)
    reason = str(client_app(message, context_of(file)).error.reason)
    assert "line 18 of a user's code failed with ValueError (own_code_failed)" in reason
    assert "a secret" not in reason
    assert "a secret" in caplog.text


ATTACKS: list[dict[str, Any]] = [
    {"model": {"name": "os:system", "command": "touch attacked"}},
    {"model": {"name": "subprocess:run", "args": "touch attacked"}},
    {"model": {"name": "evil:Net"}},
    {"method": {"name": "evil:Net"}},
    {"personalization": {"name": "evil:Net"}},
    {"data": {"name": "evil:Net"}},
    {"partition": {"name": "evil:Net"}},
    {"training": {"loss": {"name": "evil:Net"}}},
    {"training": {"optimizer": {"name": "evil:Net"}}},
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
@pytest.mark.parametrize("path", ["evil", None])
def test_nothing_is_imported_for_who_may_not_say_so(
    tmp_path: Path,
    attack: dict[str, Any],
    path: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    evil = tmp_path / "evil" / "evil.py"
    evil.write_text("import pathlib\npathlib.Path('attacked').touch()\nNet = 1\n")
    document = json.loads(for_sites(over_sites(experiment())))
    document |= attack if path is None else {**attack, "own_code": str(evil.parent)}
    text = json.dumps(document)
    if path is None:
        monkeypatch.syspath_prepend(str(evil.parent))
    file = make_sites(tmp_path, experiment())["0000"]
    problem = introduced(file, text).problem
    assert "(own_code_not_allowed)" in problem or "(not_for_sites)" in problem
    allowed = r"may not be used here|found 'evil:Net', expected a name"
    assert re.search(allowed, caplog.text)
    # The server's process, too: its file lets nothing in.
    (tmp_path / "server.yaml").write_text("insecure: true\n")
    monkeypatch.setenv("KNNPER_SERVER", str(tmp_path / "server.yaml"))
    config = {"document": text, "experiment": "", "set": "", "resume": False}
    with pytest.raises(ConfigError, match=r"may not be used here|expected a name"):
        order_of({**config, "output": "", "registry": "", "overwrite": False})
    assert not Path("attacked").exists()
    assert "evil" not in sys.modules


def with_model(folder: Path, like: StoredModel, model: dict[str, Any]) -> Path:
    """Write what a stranger could: the fingerprint is right."""
    card = replace(like.card, model=model)
    save_model(
        folder, StoredModel(card, like.weights, fingerprint_of(card, like.weights))
    )
    return folder


def test_no_card_brings_code_files_or_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = find_model(simulated(tmp_path / "run", experiment()).path)
    for number, name in enumerate(("os:system", "subprocess:getoutput")):
        model = {"name": name, "command": "touch attacked", "cmd": "touch attacked"}
        folder = with_model(tmp_path / str(number), made, model)
        for find in (load_model, find_model, lambda one: find_model(one, CLOSED)):
            with pytest.raises(OwnCodeError, match="may not be used here"):
                find(folder)
        assert stored_model(folder).card.model == model
    assert not Path("attacked").exists()
    hub = {"name": "transformers", "architecture": "some/one", "download": True}
    with pytest.raises(ConfigError, match=r"pretrained: \{one: FOLDER\}"):
        load_model(with_model(tmp_path / "hub", made, hub))
    # A file that is named is not even looked at.
    named = {**made.card.model, "weights": "no/such/file.pt"}
    assert load_model(with_model(tmp_path / "named", made, named)).weights is not None


def test_a_network_is_built_with_the_files_of_this_machine() -> None:
    settings = TransformersSettings(architecture="/server/minilm", download=True)
    choice = Choice("transformers", settings)
    door = replace(CLOSED, pretrained={"minilm": Path("/site/minilm")})
    found = with_local_files(choice, door)
    assert found.local == replace(settings, architecture="/site/minilm", download=False)
    assert found == choice
    assert with_local_files(choice, Door()) is choice
    assert with_local_files(choice, CLOSED, only_local=False) is choice


@pytest.mark.parametrize("trained", ["head", "last_blocks"])
def test_weights_of_others_lie_where_each_site_says(
    tmp_path: Path, trained: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = over_sites(experiment())
    module = open_workbench(experiment()).task.model
    weights = module.named(torch.linspace(-1, 1, module.num_weights))
    for name in ("server", "site"):
        (tmp_path / f"{name}.safetensors").parent.mkdir(exist_ok=True)
        save_file(weights, tmp_path / f"{name}.safetensors")
    chosen = {
        "model.trained": trained,
        "model.weights": tmp_path / "server.safetensors",
    }
    head = own_experiment(None, chosen)
    files = make_sites(tmp_path, experiment())
    text = for_sites(over_sites(open_workbench(head).experiment))
    assert "server.safetensors" not in text
    own = Limits(read_client(files["0000"]), site_experiment(text, CLOSED), 1)
    assert own.fingerprint == identity_at_sites(over_sites(head))
    assert "(frozen_weights)" in introduced(files["0000"], text).problem
    assert "expected a model whose frozen weights have the fingerpr" in caplog.text
    assert "pretrained: {tiny_cnn: FILE}" in caplog.text
    append(files, "pretrained: {tiny_cnn: site.safetensors}\n")
    run, serial = lead(files, head, tmp_path / "run"), tmp_path / "serial"
    (kept,) = (read_client(files["0000"]).cache / "embeddings").iterdir()
    assert any(kept.iterdir())
    exported, expected = (
        find_model(run.path),
        trained_model(simulated(serial, head).path),
    )
    # A site embeds its own examples, a simulation the whole set: in other batches.
    # Rounding errors grow with the steps; other frozen weights would differ by tenths.
    torch.testing.assert_close(exported.weights, expected.weights, rtol=1e-4, atol=1e-4)
    save_model(tmp_path / "exported", exported)
    with pytest.raises(ConfigError, match=r"pretrained: \{tiny_cnn: FILE\}"):
        load_model(tmp_path / "exported")
    client = read_client(files["0002"])
    assert find_model(tmp_path / "exported", client.door).fingerprint
    onboard(client, find_model(tmp_path / "exported", client.door))
    assert identity_at_sites(plain) != identity_at_sites(over_sites(head))
    # With other data nothing is left of what was embedded.
    shares = tmp_path / "shares"
    shutil.copy(shares / "0002.npz", shares / "0000.npz")
    lead(files, head, tmp_path / "again")
    (now,) = kept.parent.iterdir()
    assert now.name != kept.name


def test_what_is_frozen_may_follow_from_the_seed(tmp_path: Path) -> None:
    """Random weights with trained adapters: no file is needed anywhere."""
    lora = own_experiment(None, {"model": "{name: mlp, trained: lora}"})
    files = make_sites(tmp_path, experiment())
    run = lead(files, lora, tmp_path / "run")
    assert digest(run) == digest(simulated(tmp_path / "serial", lora))
    client = read_client(files["0002"])
    onboard(client, find_model(run.path / "model", client.door))
