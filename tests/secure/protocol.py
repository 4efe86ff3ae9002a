"""SecAgg+ over all its stages in one process, with clients that drop out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from knnper.privacy_settings import SecAggPlusSettings
from knnper.secure import client
from knnper.secure.client import ClientState
from knnper.secure.messages import KeysRequest, MaskRequest, Shares, UnmaskRequest
from knnper.secure.quantization import Quantizer, Words
from knnper.secure.server import SecureSum

SETTINGS = SecAggPlusSettings()
QUANTIZER = Quantizer(clip_range=1.0, bits=16)
EXECUTION = "execution-1"
STAGES = ("keys", "shares", "masked", "unmask")


@dataclass
class Execution:
    """One execution; a client in ``dropped[stage]`` does not reply to that stage."""

    updates: Mapping[str, NDArray[np.float32]]
    weights: Mapping[str, int]
    settings: SecAggPlusSettings = SETTINGS
    dropped: Mapping[str, Collection[str]] = field(default_factory=dict)
    states: dict[str, ClientState] = field(default_factory=dict)
    encoded: dict[str, Words] = field(default_factory=dict)
    masked: dict[str, Words] = field(default_factory=dict)
    mask_requests: Mapping[str, MaskRequest] = field(default_factory=dict)
    unmask_requests: Mapping[str, UnmaskRequest] = field(default_factory=dict)
    revealed: dict[str, Shares] = field(default_factory=dict)
    final_states: dict[str, ClientState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.server = SecureSum(EXECUTION, self.weights, self.settings, 7, rng)

    def _replies(self, stage: str, name: str) -> bool:
        return name not in self.dropped.get(stage, ())

    def exchange_keys(self) -> None:
        request = KeysRequest(self.server.execution)
        for name in self.weights:
            if self._replies("keys", name):
                self.states[name], keys = client.make_keys(
                    ClientState(), request, repr(self.settings)
                )
                self.server.add_keys(name, keys)

    def exchange_shares(self) -> None:
        for name, plan in self.server.plans().items():
            if self._replies("shares", name):
                self.states[name], shares = client.share_secrets(
                    self.states[name], plan
                )
                self.server.add_shares(name, shares)

    def send_masked(self) -> None:
        largest = max(self.weights.values())
        self.mask_requests = self.server.mask_requests()
        for name, request in self.mask_requests.items():
            if self._replies("masked", name):
                rng = np.random.default_rng([int(name), 1])
                weight = self.weights[name] / largest
                self.encoded[name] = QUANTIZER.encode(self.updates[name], weight, rng)
                self.states[name], self.masked[name] = client.mask(
                    self.states[name], request, self.encoded[name]
                )

    def reveal(self) -> None:
        self.unmask_requests = self.server.unmask_requests(self.masked)
        for name, request in self.unmask_requests.items():
            if self._replies("unmask", name):
                self.final_states[name], self.revealed[name] = client.unmask(
                    self.states[name], request
                )
                self.server.add_revealed(name, self.revealed[name])

    def total(self) -> Words:
        self.exchange_keys()
        self.exchange_shares()
        self.send_masked()
        self.reveal()
        masked = list(self.masked.values())
        return self.server.unmasked(np.sum(masked, 0, np.uint32))


def updates_of(count: int, size: int = 50) -> dict[str, NDArray[np.float32]]:
    """Return an update for each of ``count`` clients, of numbers in [-1, 1]."""
    rng = np.random.default_rng(count)
    return {
        f"{number:03}": rng.uniform(-1, 1, size).astype(np.float32)
        for number in range(count)
    }


def weights_of(updates: Mapping[str, object]) -> dict[str, int]:
    return {name: 10 + 7 * place for place, name in enumerate(updates)}
