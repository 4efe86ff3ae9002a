"""A ClientApp whose site does what the test's file asks for; runners import it by name.

The file is ``tricks.json`` beside the client's own: what is done, by when.
"""

import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from torch import Tensor

from knnper.client.client_app import make_client_app
from knnper.client.runtime import DataSource, Personalized, TrainingRequest
from knnper.client.site import CONFIG, SiteNode
from knnper.client.site_runtime import SiteRuntime
from knnper.data.examples import ClientData, Examples
from knnper.secure.messages import (
    KeysRequest,
    RoundPlan,
    SecureReply,
    SecureRequest,
    UnmaskRequest,
)
from knnper.strategies.core.evaluation import ClientResults
from knnper.transport.flower_protocol import APP_FAILED
from knnper.transport.messages import Job

APP = "site_tricks:app"
TRICKS = "tricks.json"
DISTRIBUTING, INSTALLING, INSTALLED = "distributing", "installing", "installed"
HOLD, KILL, HANG = "hold", "kill", "hang"
NAN, INFINITE, SHAPE, NORM, NOTHING = "nan", "infinite", "shape", "norm", "nothing"
LEAK, KEEP_MODELS, TAMPER = "leak", "keep models", "tamper"
SCALED, BOAST, RUDE = "scaled", "boast", "rude"
FLIPPED = {"flipped": 1.0, "flipped x10": 10.0, "flipped x100": 100.0}
BOASTED = 2**53
RUDENESS = "x\n2026-01-01 ERROR server: all is lost\x1b[2J[red]<script>" + "y" * 10**5
_HANG_S = 600.0


def training(server_round: int) -> str:
    """Return the time at which a client trains in a round."""
    return f"training {server_round}"


def secure_stage(message: KeysRequest | RoundPlan | UnmaskRequest) -> str:
    """Return the time at which a client answers a message of secure aggregation."""
    server_round = message.execution.partition("-")[0]
    return f"{type(message).__name__} {server_round}"


@dataclass(frozen=True)
class Tricks:
    """What one client is to do, and where it says that it is at it."""

    folder: Path

    def plan(self, deeds: Mapping[str, str]) -> None:
        """Ask for deeds, by when."""
        (self.folder / TRICKS).write_text(json.dumps(deeds))

    def deed(self, when: str) -> str:
        """Return what is asked for at that time; nothing, as a rule."""
        file = self.folder / TRICKS
        planned = json.loads(file.read_text()) if file.exists() else {}
        return str(planned.get(when, ""))

    def is_at(self, when: str) -> bool:
        """Return whether the client holds, hangs or died at that time."""
        return self._mark(when).exists()

    def let_go(self, when: str) -> None:
        """Let a client go on that holds."""
        self._mark(when).unlink()

    def do(self, when: str) -> None:
        """Do what is asked for at that time."""
        deed = self.deed(when)
        if deed not in (HOLD, KILL, HANG):
            return
        self._mark(when).write_text(deed)
        if deed == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + _HANG_S
        while self.is_at(when) and time.monotonic() < end:
            time.sleep(0.02)

    def _mark(self, when: str) -> Path:
        return self.folder / f"{when}.at"


@dataclass(frozen=True)
class _Source:
    """Data that is read at a time when something may happen."""

    inner: DataSource
    act: Callable[[], None]

    def data(self, client: str) -> ClientData:
        self.act()
        return self.inner.data(client)

    def test(self, client: str) -> Examples:
        return self.inner.test(client)

    def test_names(self, client: str) -> Any:
        return self.inner.test_names(client)

    def class_weights(self, client: str) -> Tensor | None:
        return self.inner.class_weights(client)

    def is_seen(self, client: str) -> bool:
        return self.inner.is_seen(client)


@dataclass(frozen=True)
class _Player(SiteRuntime):
    """A site's worker that does tricks in the course of what it does."""

    tricks: Tricks = field(kw_only=True)

    def train(self, request: TrainingRequest) -> Any:
        payload, server_round = request.payload, request.server_round
        when = training(server_round)
        update = SiteRuntime.train(self._acting(when), request)
        if self.tricks.deed("models") == KEEP_MODELS:
            self._keep(f"sent-{server_round}", payload.weights)
            self._keep(f"trained-{server_round}", update.weights)
        deed = self.tricks.deed(when)
        if deed == RUDE:
            raise _RudeError
        if deed == SCALED:
            moved = update.weights - payload.weights
            update = dataclasses.replace(update, weights=payload.weights + 900 * moved)
        if deed in FLIPPED:
            moved = FLIPPED[deed] * (update.weights - payload.weights)
            update = dataclasses.replace(update, weights=payload.weights - moved)
        return SPOILING.get(deed, lambda one: one)(update)

    def personalize(
        self,
        clients: Sequence[str],
        payload: Any,
        reference: Any,
        state_rounds: Sequence[int],
    ) -> ClientResults:
        if self.tricks.deed(DISTRIBUTING) == TAMPER:
            reference = _with_weights(_with_one(0.5))(reference)
        worker = self._acting(DISTRIBUTING)
        return SiteRuntime.personalize(
            worker, clients, payload, reference, state_rounds
        )

    def _acting(self, when: str) -> "_Player":
        source = _Source(self.source, lambda: self.tricks.do(when))
        return dataclasses.replace(self, source=source, keep=self._keeping())

    def _keeping(self) -> Callable[[Personalized], None]:
        keep, tricks = self.keep, self.tricks

        def kept(personalized: Personalized) -> None:
            tricks.do(INSTALLING)
            keep(personalized)
            tricks.do(INSTALLED)

        return kept

    def _keep(self, name: str, weights: torch.Tensor) -> None:
        np.save(self.tricks.folder / f"{name}.npy", weights.numpy())


class _RudeError(Exception):
    """Sends a text of its own, as a client of a stranger's could."""


class _Host(SiteNode):
    def open(self, context: Context, job: Job) -> SiteRuntime:
        worker = super().open(context, job)
        given = {
            one.name: getattr(worker, one.name) for one in dataclasses.fields(worker)
        }
        return _Player(**given, tricks=_tricks(context))

    def exchange_secrets(
        self, context: Context, job: Job, request: SecureRequest
    ) -> SecureReply:
        _tricks(context).do(secure_stage(request.message))
        return super().exchange_secrets(context, job, request)

    def failed(self, message: Message, context: Context, error: Exception) -> Message:
        if isinstance(error, _RudeError):
            return Message(Error(APP_FAILED, RUDENESS), reply_to=message)
        return super().failed(message, context, error)

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        said = super().introduce(context, job)
        tricks = _tricks(context)
        if tricks.deed("introduction") == BOAST:
            said.config_records["introduction"]["num_train"] = BOASTED
        if tricks.deed("introduction") == LEAK:
            for file in sorted(tricks.folder.glob("leak-*.npy")):
                said[file.stem] = ArrayRecord({"leak": Array(np.load(file))})
        return said


def _tricks(context: Context) -> Tricks:
    return Tricks(Path(str(context.node_config[CONFIG])).parent)


def _with_weights(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Any], Any]:
    def changed(update: Any) -> Any:
        return dataclasses.replace(update, weights=change(update.weights.clone()))

    return changed


def _with_one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(weights: torch.Tensor) -> torch.Tensor:
        weights[7] = value
        return weights

    return changed


SPOILING: Mapping[str, Callable[[Any], Any]] = {
    NAN: _with_weights(_with_one(math.nan)),
    INFINITE: _with_weights(_with_one(-math.inf)),
    SHAPE: _with_weights(lambda weights: weights[:-1]),
    NORM: _with_weights(lambda weights: weights * 1e9),
    NOTHING: lambda update: dataclasses.replace(update, num_examples=0),
    BOAST: lambda update: dataclasses.replace(update, num_examples=BOASTED),
}

app = make_client_app(lambda _: _Host())
