"""A server that asks a site for whatever it likes, introduced or not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from knnper.client.site import SiteNode, SiteWorker
from knnper.experiment import Experiment, to_json
from knnper.simulation.workbench import over_sites
from knnper.transport.messages import Introduction, Job, read_introduction
from tests.apps.site_grid import experiment

CLIENT = "0001"


def asked(**changes: object) -> Experiment:
    """Return an experiment over sites; keys are dotted, values YAML."""
    return over_sites(experiment(**changes))


def one_by_one(**changes: object) -> Experiment:
    """Return the experiment whose every update is the gradient of one image."""
    return asked(
        **{
            "model": "{name: softmax_regression}",
            "method": "{name: fedavg}",
            "personalization": "{}",
            "training.batch_size": 1,
            "training.local_steps": 1,
            **changes,
        }
    )


@dataclass(frozen=True)
class HostileServer:
    """One run of it, against the site that a file describes."""

    file: Path
    run: int = 1

    def introduced(self, settings: Experiment) -> Introduction:
        job = Job([], 0, [0], to_json(settings))
        return read_introduction(SiteNode().introduce(self._context, job))

    def worker(self, settings: Experiment) -> SiteWorker:
        """Return what answers a message, as a process of its own would."""
        return SiteNode().open(self._context, Job([CLIENT], 1, [0], to_json(settings)))

    def payload(self, settings: Experiment) -> Any:
        """Return what an honest server would send first."""
        runtime = self.worker(settings).runtime
        state = runtime.method.init([CLIENT, "0000", "0003"], runtime.key)
        return runtime.method.broadcast(state, CLIENT, runtime.key)

    def train(self, settings: Experiment, server_round: int = 1) -> tuple[Any, Any]:
        """Return what was sent in a round, and the update."""
        payload, worker = self.payload(settings), self.worker(settings)
        return payload, worker.train(CLIENT, payload, server_round, 0, [0])

    def told(self, reason: str) -> None:
        """Say that the site may not take part."""
        SiteNode().refused(self._context, reason)

    @property
    def _context(self) -> Context:
        config: dict[str, Any] = {"config": str(self.file)}
        return Context(self.run, 1, config, RecordDict(), {})


def image_of(sent: Tensor, trained: Tensor, worker: SiteWorker) -> Tensor:
    """Return the image behind one step on it, uint8 (pixels,)."""
    spec = worker.runtime.spec
    gradient = (sent - trained).double()
    num_classes = spec.num_classes
    of_bias = gradient[-num_classes:]
    of_rows = gradient[:-num_classes].reshape(num_classes, -1)
    largest = of_bias.abs().argmax()
    pixels = of_rows[largest] / of_bias[largest] * spec.std[0] + spec.mean[0]
    return (255 * pixels).round().clamp(0, 255).to(torch.uint8)
