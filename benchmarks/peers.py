"""Seconds a round and memory beside other frameworks and bare torch.

Every contender trains the same network on the same clients, with as many steps of SGD a
round, on two cores and with one thread a process: ours over Flower on Ray with two
workers and in one process, pfl-research in one process and in two, BlazeFL with two
threads, Flower's FedAvg in its simulation with two actors, and a loop of steps in two
processes, which averages nothing. None evaluates in the rounds that count.

Peers are installed into environments of their own; one that cannot be is left out. All
contenders keep their processes, and make rounds in turn. After them each makes one
round more, in which memory is looked at. Linux only.
"""

import argparse
import contextlib
import importlib.metadata
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measurement import (
    Measurement,
    Turns,
    make_parser,
    rounded,
    say,
    seconds_of,
)
from benchmarks.our_process import write_task
from benchmarks.peer_process import ROUND
from benchmarks.real_federation import free_ports
from benchmarks.workload import Workload

ROOT = Path(__file__).parents[1]
NUM_CORES = 2
OURS = "ours_flower"

WORKLOADS = {
    "small_clients": Workload(
        *(1000, 50),
        batch_size=10,
        model="leaf_cnn",
        embedding_dim=512,
        participation=0.05,
    ),
    "mobilenet": Workload(100, 250, batch_size=125, participation=0.2),
    "linear": Workload(1000, 10, batch_size=10, model="softmax_regression"),
}


@dataclass(frozen=True)
class Contender:
    """Who takes part."""

    module: str  # the program that its processes are
    arguments: Sequence[str]  # what it is told before the folder
    num_processes: int = 1  # that are started, which may start others
    requirement: str = ""  # what is in an environment of its own; empty is ours


_PFL, _BLAZEFL = "pfl==0.6.0", "blazefl==2.0.3"
CONTENDERS = {
    OURS: Contender("our_process", [OURS]),
    "ours_serial": Contender("our_process", ["ours_serial"]),
    "pfl_one": Contender("peer_pfl", [], 1, _PFL),
    "pfl_two": Contender("peer_pfl", [], 2, _PFL),
    # It takes Python 3.12, and from 3.0.0 on 3.14, which we do not take yet.
    "blazefl": Contender("peer_blazefl", [], 1, _BLAZEFL),
    "flower_fedavg": Contender("our_process", ["flower_fedavg"]),
    "bare_torch": Contender("our_process", ["bare_torch"], 2),
}


class NotInstalledError(Exception):
    """A peer that cannot be had here, and why."""


class Running(contextlib.ExitStack):
    """The processes of a contender, which wait until they are told to make a round.

    The folder has the task, and gets what they say. A round must have ``num_steps`` of
    SGD.
    """

    def __init__(
        self, name: str, python: Path | str, folder: Path, num_steps: int
    ) -> None:
        super().__init__()
        self._name, self._log = name, folder / f"{name}.log"
        self._num_steps, contender = num_steps, CONTENDERS[name]
        stderr = self.enter_context(self._log.open("wb"))
        ports = free_ports(contender.num_processes)
        self._processes: list[subprocess.Popen[str]] = []
        for rank in range(contender.num_processes):
            process = subprocess.Popen(
                _command(contender, python, folder, rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=_environment(contender, ports, rank),
            )
            self._processes.append(process)
            self.callback(_end, process)

    def make_round(self) -> float:
        """Make the next round; return the seconds until all processes have answered."""
        steps: list[int] = []
        seconds = seconds_of(lambda: steps.extend(self._ask(ROUND)))
        if sum(steps) != self._num_steps:
            raise RuntimeError(
                f"{self._name} made {sum(steps)} steps of SGD in a round, expected "
                f"{self._num_steps}: there is nothing to compare"
            )
        return seconds

    def model(self) -> dict[str, Tensor]:
        """Return the global model; empty where there is none."""
        file = self._log.with_suffix(".pt")
        list(self._ask(str(file)))
        found: dict[str, Tensor] = torch.load(file, weights_only=True)
        return found

    def peak_megabytes(self) -> float:
        """Make another round; return the most memory that was held in it."""
        over, most = threading.Event(), 0.0

        def look() -> None:
            nonlocal most
            is_over = False
            while not is_over:  # at least once, however short the round is
                pids = [process.pid for process in self._processes]
                most = max(most, sum(map(_held_megabytes, with_descendants(pids))))
                is_over = over.wait(0.05)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            self.make_round()
        finally:
            over.set()
            looking.join()
        return most

    def _ask(self, line: str) -> Iterator[int]:
        for process in self._processes:
            assert process.stdin is not None, "a pipe"
            with contextlib.suppress(BrokenPipeError):  # its answer is missing, then
                process.stdin.write(line + "\n")
                process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None, "a pipe"
            yield self._number(process.stdout.readline())

    def _number(self, answer: str) -> int:
        if not answer:
            said = self._log.read_text("utf-8", "replace").strip().splitlines()[-15:]
            raise RuntimeError("\n".join([f"{self._name} ended, having said:", *said]))
        return int(answer)


def _command(
    contender: Contender, python: Path | str, folder: Path, rank: int
) -> list[str]:
    command = [str(python), "-m", f"benchmarks.{contender.module}"]
    command += [*contender.arguments, str(folder)]
    return command if contender.requirement else [*command, "--rank", str(rank)]


def _environment(contender: Contender, ports: list[int], rank: int) -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if contender.num_processes > 1:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        variables["PFL_WORKER_ADDRESSES"] = ",".join(addresses)
        variables["PFL_WORKER_RANK"] = str(rank)
    return variables


def _end(process: "subprocess.Popen[str]") -> None:
    """Tell a process that there are no more rounds; kill it if it does not hear."""
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def with_descendants(pids: Sequence[int]) -> set[int]:
    """Return the processes and all that they started, directly or not."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name, in parentheses, can hold anything.
            _, parent = (
                stat.read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            )
            parents[int(stat.parent.name)] = int(parent)
    found, latest = set(pids), set(pids)
    while latest:
        latest = {pid for pid, parent in parents.items() if parent in latest} - found
        found |= latest
    return found


def _held_megabytes(pid: int) -> float:
    """Return a process's memory without pages of files; shared pages count in part."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace")
    except OSError:  # it ended meanwhile
        return 0.0
    lines = rollup.splitlines()
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) for line in lines if line.startswith(kinds)) / 1024


def python_of(contender: Contender, environments: Path) -> Path | str:
    """Return the Python that runs a contender, once what it needs is installed.

    An environment that is there is used, with its Python.

    Raises
    ------
    NotInstalledError
        If pip cannot.
    """
    if not contender.requirement:
        return sys.executable
    name, _, version = contender.requirement.partition("==")
    folder = (environments / name).absolute()
    python = folder / "bin" / "python"
    if any(folder.glob(f"lib/*/site-packages/{name}-{version}.dist-info")):
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    torch_version = importlib.metadata.version("torch").partition("+")[0]
    say(f"peers: {contender.requirement} is installed in {folder}")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--quiet", contender.requirement, f"torch=={torch_version}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        found = subprocess.check_output([str(python), "--version"], text=True)
        reason = _reason(contender.requirement, ended.stderr)
        raise NotInstalledError(f"{reason}; found {found.strip()}")
    return python


def _reason(requirement: str, said: str) -> str:
    """Return why pip could not install it: the wrong Python, or its last words."""
    name, _, version = requirement.partition("==")
    if wants := re.search(rf"\b{re.escape(version)} Requires-Python ([^;\s]+)", said):
        return f"{name} {version} takes Python {wants[1]}"
    return (said.strip().splitlines() or ["pip failed"])[-1]


def installed(names: Sequence[str], environments: Path) -> dict[str, Path | str]:
    """Return the Pythons of those that can take part; say why the others cannot."""
    pythons: dict[str, Path | str] = {}
    for name in names:
        try:
            pythons[name] = python_of(CONTENDERS[name], environments)
        except NotInstalledError as error:
            say(f"peers: {name} is left out: {error}")
    return pythons


def require_same_work(
    name: str,
    model: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    network: torch.nn.Module,
    is_fixed: bool,
) -> None:
    """Refuse a contender whose first round, which began as ours, was not as ours.

    Where chance chose nothing both models have to be the same, else as far from the
    start as each other.
    """
    if not model:
        return
    start = {name: one.detach() for name, one in network.named_parameters()}
    moved = _distance(start, ours, start)
    if is_fixed:
        found = _distance(start, model, ours)
    else:
        found = abs(_distance(start, model, start) - moved)
    tolerance = 1e-3 if is_fixed else 0.2
    if not found <= tolerance * moved:
        raise RuntimeError(
            f"the first round of {name} differs from ours by {found / moved:.2%} of "
            f"what ours changed, expected at most {tolerance:.1%}"
        )


def _distance(
    names: Iterable[str], one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> float:
    """Return the norm of the difference of the named parameters."""
    return math.hypot(*(float((one[name] - other[name]).norm()) for name in names))


def measure(
    title: str, workload: Workload, pythons: dict[str, Path | str], repetitions: int
) -> list[Measurement]:
    """Return a line for each contender, of which `OURS` is the first."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        task = write_task(workload, Path(name))
        num_steps = task.cohort_size * task.steps_per_client
        # Where all clients take part, each with one step, nothing is left to chance.
        is_fixed = num_steps == len(task.clients)
        running: dict[str, Running] = {}
        models: dict[str, dict[str, Tensor]] = {}
        for one, python in pythons.items():
            say(f"peers: {title}: {one} starts")
            contender = Running(one, python, Path(name), num_steps)
            running[one] = stack.enter_context(contender)
            contender.make_round()
            models[one] = contender.model()
            require_same_work(one, models[one], models[OURS], task.network, is_fixed)
        seconds: dict[str, list[float]] = {one: [] for one in running}
        for number in range(repetitions):
            say(f"peers: {title}: round {number + 1} of {repetitions}")
            for one, contender in running.items():
                seconds[one].append(contender.make_round())
        say(f"peers: {title}: rounds in which memory is looked at")
        peaks = {one: contender.peak_megabytes() for one, contender in running.items()}
    return [
        figures(title, one, Turns(seconds[OURS], seconds[one]), peaks[one])
        for one in running
    ]


def figures(title: str, name: str, turns: Turns, megabytes: float) -> Measurement:
    """Return a contender's line, of the seconds of `OURS` and its own."""
    ratios = turns.ratios()
    details: dict[str, object] = {
        "workload": title,
        "contender": name,
        "rounds_per_s": rounded(1 / statistics.median(turns.bare)),
        "ours_over_this": rounded(statistics.median(ratios)),
        "spread_of_ratio": [rounded(min(ratios)), rounded(max(ratios))],
        "peak_megabytes": rounded(megabytes),
        "command": f"make bench-peers ARGS='--workload {title} --only {name}'",
    }
    baseline_is = f"seconds a round of {OURS}"
    return Measurement("peers", turns.bare, turns.ours, baseline_is, details)


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=7)
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="one of them (several)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=CONTENDERS,
        help=f"a contender to compare with {OURS} (several; default: all)",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / "build" / "peers",
        metavar="FOLDER",
        help="where peers have their environments, made if they are not there "
        "(default: build/peers)",
    )
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    # What it starts, it starts on these, with as many threads as there are.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    names = [one for one in CONTENDERS if one in (OURS, *(given.only or CONTENDERS))]
    pythons = installed(names, given.environments)
    for title in given.workload or WORKLOADS:
        workload = replace(WORKLOADS[title], images=given.images)
        for line in measure(title, workload, pythons, given.repetitions):
            print(line.as_json(), flush=True)


if __name__ == "__main__":
    main()
