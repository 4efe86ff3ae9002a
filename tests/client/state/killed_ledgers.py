"""Kills pairs of processes that send protected updates, and prints what was left."""

import functools
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from knnper.client.privacy_budget import PrivacyBudget
from knnper.client.privacy_ledger import read_updates
from knnper.client.settings import SitePrivacySettings
from knnper.privacy import Release, epsilon_of

KILLS, MOST_UPDATES = 200, 60
NOISE_MULTIPLIER = 8.0
START_S = 0.03
SENT = b"u"


@functools.cache  # before a fork, since the first ε takes a second
def budget(state: Path) -> PrivacyBudget:
    """Return a budget into which `MOST_UPDATES` just fit."""
    releases = [Release(NOISE_MULTIPLIER / 2, count=MOST_UPDATES)]
    settings = SitePrivacySettings(
        clip_norm=1.0,
        noise_multiplier=NOISE_MULTIPLIER,
        epsilon_run=epsilon_of(releases, 1e-5) + 1e-6,
    )
    return PrivacyBudget(settings, state, "e" * 64)


def send_updates(state: Path, pipe: int) -> None:
    """Send updates, of one byte, until the budget is spent."""
    site = budget(state)
    while not site.spend(1):
        os.write(pipe, SENT)


def start(state: Path, pipe: int) -> int:
    """Return the id of a process that sends updates."""
    process = os.fork()
    if not process:
        try:
            send_updates(state, pipe)
        finally:
            os._exit(0)
    return process


def kill_pair(state: Path, longest_s: float) -> tuple[int, int]:
    """Start two processes and kill each within ``longest_s``.

    Return how many were running, and how many updates both had sent.
    """
    reading, writing = os.pipe()
    budget(state)
    processes = [start(state, writing) for _ in range(2)]
    os.close(writing)
    num_killed = 0
    for process in processes:
        time.sleep(longest_s * secrets.randbelow(1000) / 1000)
        os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        num_killed += os.WIFSIGNALED(status)
    with os.fdopen(reading, "rb") as pipe:
        return num_killed, len(pipe.read())


def main(folder: Path) -> None:
    """Kill `KILLS` processes; print a record of each pair, as JSON."""
    records: list[dict[str, int]] = []
    longest_s = START_S
    while sum(record["num_killed"] for record in records) < KILLS:
        # A new budget once the last one is spent: processes then end by themselves.
        is_spent = not records or records[-1]["num_killed"] == 0
        if is_spent:
            state = folder / str(len(records))
        num_killed, num_sent = kill_pair(state, longest_s)
        # However busy the machine is: a pair sends a few updates before it is killed.
        longest_s *= 1.3 if num_sent < 2 else 0.8
        num_recorded = len(read_updates(state))
        records.append(
            {
                "budget": int(state.name),
                "num_killed": num_killed,
                "num_sent": num_sent,
                "num_recorded": num_recorded,
            }
        )
    sys.stdout.write(json.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
