"""Installs a model again and again, killed a little later each time.

Prints, as JSON, what was found after each kill. Run as a program: it forks.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from knnper.client.served_model import open_served
from knnper.client.site_state import SiteState
from knnper.datastore.search import LiveView
from knnper.datastore.store import Store
from knnper.strategies.core.exported_model import GlobalModel
from tests.client.state.small_site import new_site_state, queries, site, small_model

KILLED = 9
STRIDE = 3
EVENTS = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}


class Countdown:
    """Ends the process, as SIGKILL would, at the n-th step."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            os._exit(KILLED)

    def watch(self) -> None:
        """Count changes of folders, and what the store does, before and after."""
        sys.addaudithook(lambda event, _: self.step() if event in EVENTS else None)
        for owner, name in ((Store, "add"), (Store, "reembed"), (LiveView, "switch")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            self.step()
            result = function(*arguments, **named)
            self.step()
            return result

        return call


def install(site_state: SiteState, model: GlobalModel, num_train: int) -> None:
    site_state.install(model, site(num_train, 4, 3), took_part=False)


def killed(site_state: SiteState, model: GlobalModel, steps: int) -> bool:
    child = os.fork()
    if child == 0:
        Countdown(steps).watch()
        install(site_state, model, 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def answer(site_state: SiteState) -> dict[str, object] | None:
    if site_state.served() is None:
        return None
    with open_served(site_state) as served:
        prediction = served.predict(queries(4))
        expected = served.model.head(served.model.embed(queries(4)))
        return {
            "model": prediction.vote.neighbors.fingerprint,
            "num_stored": prediction.vote.num_stored,
            "is_consistent": torch.equal(expected, prediction.global_probabilities),
        }


def trial(parent: Path, start: GlobalModel | None, steps: int) -> dict[str, object]:
    """Return what is there after a kill, and after the next installation."""
    shutil.rmtree(parent, ignore_errors=True)
    site_state = new_site_state(parent)
    if start is not None:
        install(site_state, start, 6)
    model = small_model(seed=1)
    was_killed = killed(site_state, model, steps)
    answered = answer(site_state)
    install(site_state, model, 8)
    after = answer(site_state)
    leftovers = sorted(path.name for path in site_state.folder.path.iterdir())
    return {
        "was_killed": was_killed,
        "found": answered,
        "after": after,
        "leftovers": leftovers,
    }


def main(parent: Path) -> None:
    torch.set_num_threads(1)
    outcomes = {}
    for name, start in (("first", None), ("later", small_model(seed=0))):
        trials: list[dict[str, object]] = []
        while not trials or trials[-1]["was_killed"]:
            steps = STRIDE * len(trials) + 1
            trials.append(trial(parent / name, start, steps))
        outcomes[name] = trials
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
