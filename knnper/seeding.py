"""The one source of randomness: keys that are split, never a shared generator.

Every random choice derives from (seed, purpose, round, client, ...). Two choices with
different paths are independent, and a choice is the same on any number of workers, in
any order, and in a run that was killed and resumed.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RandomKey:
    """A seed and the path of its purpose."""

    seed: int  # the experiment's seed
    # Purpose, then round, client or any other distinction between two uses.
    path: tuple[str | int, ...] = ()

    def child(self, *parts: str | int) -> "RandomKey":
        """Return the key of a part of this key's purpose."""
        return RandomKey(self.seed, (*self.path, *parts))

    def entropy(self, num_bytes: int = 16) -> int:
        """Return a non-negative integer of ``num_bytes`` bytes fixed by seed and path.

        SHA-256 of a canonical text, so the value does not depend on the platform, the
        Python version or hash randomisation.
        """
        text = json.dumps([self.seed, *self.path], separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:num_bytes], "big")

    def numpy(self) -> np.random.Generator:
        """Return a fresh NumPy generator (PCG64) for this key."""
        return np.random.Generator(np.random.PCG64(self.entropy()))

    def device(self, client: str) -> tuple[float, float]:
        """Draw the speeds of a client's device and of its link.

        Both are standard normal: deviations of the logarithm from its mean. Call it on
        the run's root key, so that a client has the same device in all rounds.
        """
        generator = self.child("device", client).numpy()
        return generator.normal(), generator.normal()

    @contextlib.contextmanager
    def torch(self) -> Iterator[None]:
        """Seed torch's global generators inside the block; restore them afterwards.

        Layers such as dropout and the default initialisers draw from the generator of
        the device they compute on and take no other.
        """
        import torch

        # Asking for the state of a GPU that is not in use would take it into use.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count() if in_use else 0)
        with torch.random.fork_rng(devices=devices):
            # torch.manual_seed would note the call stack for each kind of device that
            # is not in use, which takes longer than a step of a small model.
            seed = self.entropy(num_bytes=7)
            torch.default_generator.manual_seed(seed)
            if in_use:
                torch.cuda.manual_seed_all(seed)
            yield
