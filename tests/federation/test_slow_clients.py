"""Five real clients, some far slower than others: steps as they come, or known before.

What makes a client slow is its user's own loss, see `pace`. No assertion is about time:
a client that trains until it is let go is slow on any machine.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.federation import pace
from tests.federation.small_federation import (
    EXPERIMENT,
    Example,
    Federation,
    Run,
    found_federation,
)
from tests.processes import Commands, Running, wait_until

pytestmark = pytest.mark.slow

CLIENTS = ("0000", "0001", "0002", "0003", "0004")
*FAST, SLOW = CLIENTS
# Seconds a mini-batch, of which a round has two: over two orders of magnitude.
PACES = dict(zip(CLIENTS, (0.01, 0.03, 0.1, 0.3, 1.0), strict=True))
ON_AND_ON = 3600.0
DOCUMENT: Mapping[str, Any] = {
    **EXPERIMENT,
    "partition": {"name": "dirichlet", "num_clients": 5, "alpha": 5.0},
    "training": {
        "num_rounds": 6,
        "local_steps": 2,
        "batch_size": 16,
        "learning_rate": 0.05,
        "loss": {"name": "pace:loss"},
    },
}
BUFFERED = "training.timing={name: buffered, buffer_size: 1}"
MANY = "training.num_rounds=12"
FAR_TOO_LONG_S = 1200.0


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Digits split over five clients, with a loss of the user's own."""
    made = Example(tmp_path_factory.mktemp("five"), DOCUMENT)
    shutil.copy(pace.__file__, made.folder)
    made.make()
    return made


@dataclass(frozen=True)
class Paced:
    """A federation whose clients are as slow as is asked for."""

    federation: Federation

    def pace(self, name: str, seconds: float) -> None:
        """Let each of a client's mini-batches take so long, the present one too."""
        beside = self._file(name).with_suffix(".new")
        beside.write_text(str(seconds))
        beside.replace(self._file(name))

    def paces(self, paces: Mapping[str, float]) -> None:
        for name, seconds in paces.items():
            self.pace(name, seconds)

    def training(self, name: str) -> str:
        """Return by which of its processes a client trained last; empty if by none."""
        mark = self._file(name).with_suffix(".at")
        return mark.read_text() if mark.exists() else ""

    def _file(self, name: str) -> Path:
        return self.federation.client_folder(name) / "seconds"

    def start(self, *names: str) -> dict[str, Running]:
        """Start clients; return when all are in."""
        started = {name: self.federation.client(name) for name in names or CLIENTS}
        for node in started.values():
            node.wait_for("in the federation of")
        return started


@pytest.fixture
def paced(tmp_path: Path, five: Example, commands: Commands) -> Paced:
    """Five clients that may use the loss, and the server's file that allows it."""
    folder = tmp_path / "fed"
    inside = {
        name: ("env", f"{pace.VARIABLE}={folder / 'clients' / name / 'seconds'}")
        for name in CLIENTS
    }
    found = found_federation(folder, five, commands, clients=CLIENTS, inside=inside)
    allowed = {"folder": str(five.folder), "allowed": ["pace:loss"]}
    for name in CLIENTS:
        found.configure(name, own_code=allowed)
    server = yaml.safe_load(found.server_file.read_text())
    found.server_file.write_text(yaml.safe_dump({**server, "own_code": allowed}))
    made = Paced(found)
    made.paces(PACES)
    return made


# Who is fast in virtual time is slow on this machine.
DEVICES = (
    "training.devices={examples_per_s: 10, speed_spread: 100, available: 0.8, "
    "period_s: 20}"
)


@pytest.mark.parametrize(
    "timing",
    [
        "{name: buffered, buffer_size: 2}",
        "{name: synchronous, over_selection: 1.3, deadline_s: 9}",
    ],
)
def test_the_schedule_of_virtual_time_over_five_processes(
    paced: Paced, five: Example, timing: str
) -> None:
    changes = (
        *(DEVICES, f"training.timing={timing}", "training.participation=0.6"),
        # In a simulation nobody says anything of its number of examples.
        "run.federation.max_share=1.0",
    )
    name = timing.split()[1].strip(",")
    reference = Run(five.simulated(f"serial-{name}", *changes))
    paced.federation.server()
    paced.start()
    submitted, run = paced.federation.submit(*changes)
    assert submitted.wait(FAR_TOO_LONG_S) == 0
    run.require_same(reference.folder, CLIENTS)
    told = ("virtual_seconds", "num_clients", "num_late", "staleness", "staleness_max")
    for one, other in zip(run.rounds, reference.rounds, strict=True):
        assert [one[key] for key in told] == [other[key] for key in told]


def participants(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return whose updates the steps are made of, each as often as it was in one."""
    return [name for one in rounds for name in one["participants"]]


def require_steps_of_one(run: Run, count: int) -> None:
    """Each step is of one update, and nobody was asked before it had answered."""
    rounds = run.rounds
    assert [one["num_clients"] for one in rounds] == [1] * count
    free_from = dict.fromkeys(CLIENTS, 0)
    for number, one in enumerate(rounds, 1):
        ((client, staleness),) = one["participants"].items()
        assert free_from[client] <= number - 1 - staleness < number
        free_from[client] = number


def test_steps_are_made_while_one_trains_on_and_on(paced: Paced) -> None:
    """FedBuff: what it sends in the end counts, with the steps that it missed."""
    paced.pace(SLOW, ON_AND_ON)
    paced.federation.server()
    paced.start()
    submitted, run = paced.federation.submit(BUFFERED, MANY)
    run.wait_for_rounds(4)
    assert paced.training(SLOW)
    assert SLOW not in participants(run.rounds)
    paced.paces({**dict.fromkeys(FAST, ON_AND_ON), SLOW: 0.01})
    wait_until(lambda: SLOW in participants(run.rounds), "the slow one is in a step")
    paced.paces(PACES)
    assert submitted.wait(FAR_TOO_LONG_S) == 0
    require_steps_of_one(run, 12)
    steps = [one for one in run.rounds if SLOW in one["participants"]]
    missed = steps[0]["participants"][SLOW]
    assert missed == steps[0]["server_round"] - 1 >= 4
    own = [one["participants"][SLOW] for one in steps]
    row = run.clients[SLOW]
    assert int(row["num_rounds"]) == len(own)
    assert float(row["staleness"]) == pytest.approx(sum(own) / len(own))


@pytest.mark.parametrize(
    ("timing", "participation", "needed"),
    [("over_selection: 1.6", 0.6, 3), ("deadline_s: 3", 1.0, 5)],
)
def test_a_round_does_not_wait_for_who_is_late(
    paced: Paced, timing: str, participation: float, needed: int
) -> None:
    """It trains to its end for nothing, and is asked again afterwards."""
    paced.pace(SLOW, ON_AND_ON)
    paced.federation.server()
    paced.start()
    submitted, run = paced.federation.submit(
        f"training.timing={{name: synchronous, {timing}}}",
        f"training.participation={participation}",
    )
    run.wait_for_rounds(2)
    seen = run.rounds
    assert seen[0]["num_clients"] + seen[0]["num_late"] == 5
    assert all(1 <= one["num_clients"] <= needed for one in seen)
    assert SLOW not in participants(seen)
    first = paced.training(SLOW)
    paced.pace(SLOW, 0.01)
    wait_until(lambda: paced.training(SLOW) != first, "the slow one is asked again")
    assert submitted.wait(FAR_TOO_LONG_S) == 0
    assert [one["num_failed"] for one in run.rounds] == [0] * 6
    assert {one["staleness_max"] for one in run.rounds} == {0}
    assert set(run.clients) == set(CLIENTS)


def test_a_client_that_is_killed_stops_nothing(paced: Paced) -> None:
    """First the process in which it trains, then all of another client."""
    paced.pace(SLOW, ON_AND_ON)
    paced.federation.server()
    nodes = paced.start()
    submitted, run = paced.federation.submit(BUFFERED, MANY)
    run.wait_for_rounds(2)
    wait_until(lambda: paced.training(SLOW), "the slow one trains")
    paced.pace(SLOW, pace.DIES)
    wait_until(lambda: any("failures" in one for one in run.rounds), "it has failed")
    paced.pace(SLOW, 0.01)
    nodes[FAST[0]].kill()
    assert submitted.wait(FAR_TOO_LONG_S) == 0
    require_steps_of_one(run, 12)
    died = [one["failures"] for one in run.rounds if SLOW in one.get("failures", {})]
    assert all("SIGKILL" in found[SLOW] for found in died)
    assert set(run.clients) == set(CLIENTS) - {FAST[0]}
    assert run.results["model_distribution"]["offline"] == [FAST[0]]


def test_a_server_that_is_killed_goes_on(paced: Paced, commands: Commands) -> None:
    """What was under way is lost; the steps before are kept, and those missing made."""
    paced.pace(SLOW, ON_AND_ON)
    server = paced.federation.server()
    paced.start()
    submitted, run = paced.federation.submit(BUFFERED, MANY)
    run.wait_for_rounds(4)
    paced.paces(dict.fromkeys(FAST, ON_AND_ON))
    server.kill()
    for name in ("flower-superlink", "flwr-serverapp"):
        wait_until(lambda: not commands.processes(name), f"{name} has ended")  # noqa: B023
    before = run.rounds
    paced.federation.server()
    paced.paces(PACES)
    assert submitted.wait() == 1
    resume = f"knnper fed submit {paced.federation.server_file} --resume {run.folder}"
    assert resume in " ".join(submitted.written.split())
    assert paced.federation.resume(run).wait(FAR_TOO_LONG_S) == 0
    assert len(before) >= 4
    kept = [one for one in run.rounds if one in before]
    assert kept in (before, before[:-1])
    for part in (run.rounds[: len(kept)], run.rounds[len(kept) :]):
        assert [one["num_clients"] for one in part] == [1] * len(part)
    assert len(run.rounds) == 12
    offline = run.results["model_distribution"]["offline"]
    assert {*run.clients, *offline} == set(CLIENTS)
