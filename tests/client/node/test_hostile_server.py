"""A real server that asks a real site for single images, introduced or not."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from knnper.client.flower_node import CLIENT_APP
from knnper.client.limits import REFUSALS
from knnper.experiment import to_json
from tests.apps.site_grid import experiment, make_sites
from tests.client.node.real_processes import Link, client, link_running, new_client
from tests.client.site.hostile_server import CLIENT, one_by_one

pytestmark = pytest.mark.slow

# Softmax regression with a batch of one and one step: every update is one image.
HOSTILE = f"""
import json, time
from pathlib import Path
from flwr.app import Message
from flwr.serverapp import ServerApp
from knnper.experiment import from_json
from knnper.transport.messages import (Job, pack, packed_of, to_content, unpack)
from knnper.strategies.catalogue import assemble, site_catalogue
from knnper.strategies.core.records import ModelPayload, ModelUpdate
app = ServerApp()

def images_of(sent, trained, spec):
    gradient = (sent - trained).double()
    of_bias = gradient[-spec.num_classes:]
    largest = of_bias.abs().argmax()
    row = gradient[:-spec.num_classes].reshape(spec.num_classes, -1)[largest]
    pixels = row / of_bias[largest] * spec.std[0] + spec.mean[0]
    return (255 * pixels).round().clamp(0, 255).int().tolist()

@app.main()
def main(grid, context):
    text = Path(context.run_config["experiment"]).read_text()
    experiment = from_json(text, site_catalogue())
    spec = experiment.data.settings.task().spec
    weights = assemble(experiment, spec).task.initial_weights
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    heard = []
    for number in range(1, 6):
        job = Job(["{CLIENT}"], number, [0], text, state_rounds=[0])
        content = to_content(job, {{"payload": pack(ModelPayload(weights), None)}})
        sent = list(grid.push_messages([Message(content, nodes[0], "train")]))
        while not (replies := list(grid.pull_messages(sent))):
            time.sleep(0.05)
        (reply,) = replies
        if reply.has_error():
            heard.append(reply.error.reason)
            continue
        update = unpack(ModelUpdate, packed_of(reply.content, "reply"))
        heard.append(images_of(weights, update.weights, spec))
    Path(context.run_config["output"]).write_text(json.dumps(heard))
"""


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    (tmp_path / "link").mkdir()
    with link_running(tmp_path / "link") as one:
        yield one


def test_it_gets_images_only_where_the_site_allows_it(
    tmp_path: Path, link: Link
) -> None:
    make_sites(tmp_path, experiment())
    shares = tmp_path / "shares"
    images = np.load(shares / f"{CLIENT}.npz")["train_inputs"].reshape(-1, 64).tolist()
    guarded, config = _attacked(tmp_path / "guarded", link, shares, "")
    assert len(guarded) == 5
    assert all("limits.min_examples" in str(one) for one in guarded)
    noted = (config.parent / "state" / REFUSALS).read_text().splitlines()
    assert len(noted) == 1, "once, however often it is asked"
    opened, _ = _attacked(
        tmp_path / "opened", link, shares, "limits: {min_examples: 1}\n"
    )
    assert all(one in images for one in opened), "the attack is a real one"


def _attacked(
    folder: Path, link: Link, shares: Path, limits: str
) -> tuple[list[object], Path]:
    """Return what the hostile server hears of a site, and the site's file."""
    config = new_client(folder, link)
    text = config.read_text().replace(f"name: {folder.name}", f"name: '{CLIENT}'")
    data = f"data: {{name: npz, path: {shares / CLIENT}.npz}}\n"
    config.write_text(text[: text.index("data:")] + data + limits)
    link.register(config.with_name("client.key"), folder.name)
    asked = folder / "asked.json"
    asked.write_text(to_json(one_by_one()))
    with client(config, "--app", CLIENT_APP) as process:
        process.wait_until_in()
        heard: list[object] = link.run(
            folder / "app",
            f'experiment="{asked}"',
            trial_server=HOSTILE,
            trial_client="from trial_server import app\napp = app\n",
        )
    return heard, config
