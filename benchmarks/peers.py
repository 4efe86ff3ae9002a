"""Seconds a round and memory beside other frameworks and bare torch.

Every contender trains the same network on the same clients with the same number of SGD
steps per round, on two cores with one thread per process: ours on Flower and Ray with
two workers and in one process, pfl-research in one and in two processes, BlazeFL with
two threads, Flower's FedAvg in its simulation with two actors, and a loop of steps in
two processes without averaging. No measured round includes an evaluation.

Peers are installed into their own environments; a peer that cannot be installed is left
out. All contenders keep their processes and take turns. Finally, each makes another
round to measure its memory. Linux only.
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
_PFL, _BLAZEFL = "pfl==0.6.0", "blazefl==2.0.3"


@dataclass(frozen=True)
class Contender:
    """A contender and its processes."""

    module: str  # program of its processes
    arguments: Sequence[str]  # before the folder
    num_processes: int = 1  # started directly; these may start others
    requirement: str = ""  # pip requirement of its environment; empty for ours


CONTENDERS = {
    OURS: Contender("our_process", [OURS]),
    "ours_serial": Contender("our_process", ["ours_serial"]),
    "pfl_one": Contender("peer_pfl", [], 1, _PFL),
    "pfl_two": Contender("peer_pfl", [], 2, _PFL),
    # It requires Python 3.12; 3.0.0 requires 3.14, which we do not support yet.
    "blazefl": Contender("peer_blazefl", [], 1, _BLAZEFL),
    "flower_fedavg": Contender("our_process", ["flower_fedavg"]),
    "bare_torch": Contender("our_process", ["bare_torch"], 2),
}


class NotInstalledError(Exception):
    """Raised with the reason why a peer cannot be installed."""


class RunningContender(contextlib.ExitStack):
    """The processes of a contender, which make rounds on request.

    The folder contains the task and receives the logs. A round must have ``num_steps``
    SGD steps.
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
        """Return the global model; empty if there is none."""
        file = self._log.with_suffix(".pt")
        list(self._ask(str(file)))
        state: dict[str, Tensor] = torch.load(file, weights_only=True)
        return state

    def peak_megabytes(self) -> float:
        """Make another round and return its peak memory."""
        over = threading.Event()
        most = 0.0

        def look() -> None:
            nonlocal most
            is_over = False
            while not is_over:  # at least once, even in a short round
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
            with contextlib.suppress(BrokenPipeError):  # noticed by its missing answer
                process.stdin.write(line + "\n")
                process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None, "a pipe"
            yield self._number(process.stdout.readline())

    def _number(self, answer: str) -> int:
        if not answer:
            log_lines = (
                self._log.read_text("utf-8", "replace").strip().splitlines()[-15:]
            )
            raise RuntimeError(
                "\n".join([f"{self._name} ended, having said:", *log_lines])
            )
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
    """Close the input of a process; kill it if it does not end."""
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
    """Return the processes and all their descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            # The name, in parentheses, may contain any character.
            _, parent = (
                stat.read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            )
            parents[int(stat.parent.name)] = int(parent)
    known, latest = set(pids), set(pids)
    while latest:
        latest = {pid for pid, parent in parents.items() if parent in latest} - known
        known |= latest
    return known


def _held_megabytes(pid: int) -> float:
    """Return a process's memory without pages of files; shared pages are divided."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace")
    except OSError:  # the process has ended
        return 0.0
    lines = rollup.splitlines()
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) for line in lines if line.startswith(kinds)) / 1024


def python_of(contender: Contender, environments: Path) -> Path | str:
    """Install a contender's requirement and return its Python.

    An existing environment is used with its Python.

    Raises
    ------
    NotInstalledError
        If pip fails.
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
        python_version = subprocess.check_output([str(python), "--version"], text=True)
        reason = _reason(contender.requirement, ended.stderr)
        raise NotInstalledError(f"{reason}; found {python_version.strip()}")
    return python


def _reason(requirement: str, output: str) -> str:
    """Return why pip failed: the wrong Python, or the end of its output."""
    name, _, version = requirement.partition("==")
    if wants := re.search(rf"\b{re.escape(version)} Requires-Python ([^;\s]+)", output):
        return f"{name} {version} takes Python {wants[1]}"
    return (output.strip().splitlines() or ["pip failed"])[-1]


def installed(names: Sequence[str], environments: Path) -> dict[str, Path | str]:
    """Return the Pythons of the installable contenders; report why others fail."""
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
    our_model: Mapping[str, Tensor],
    network: torch.nn.Module,
    is_fixed: bool,
) -> None:
    """Raise unless a contender's first round, from our start, agrees with ours.

    Without random choices, both models must be equal; else they must have the same
    distance from the start.
    """
    if not model:
        return
    start = {name: parameter.detach() for name, parameter in network.named_parameters()}
    moved = _distance(start, our_model, start)
    if is_fixed:
        distance = _distance(start, model, our_model)
    else:
        distance = abs(_distance(start, model, start) - moved)
    tolerance = 1e-3 if is_fixed else 0.2
    if not distance <= tolerance * moved:
        raise RuntimeError(
            f"the first round of {name} differs from ours by {distance / moved:.2%} of "
            f"what ours changed, expected at most {tolerance:.1%}"
        )


def _distance(
    names: Iterable[str], first: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> float:
    """Compute the norm of the difference of the named parameters."""
    return math.hypot(*(float((first[name] - other[name]).norm()) for name in names))


def measure(
    title: str, workload: Workload, pythons: dict[str, Path | str], repetitions: int
) -> list[Measurement]:
    """Measure the contenders, with `OURS` as the first, and return their lines."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        task = write_task(workload, Path(folder))
        num_steps = task.cohort_size * task.steps_per_client
        # If all clients take part with one step each, there are no random choices.
        is_fixed = num_steps == len(task.clients)
        running: dict[str, RunningContender] = {}
        models: dict[str, dict[str, Tensor]] = {}
        for name, python in pythons.items():
            say(f"peers: {title}: {name} starts")
            contender = RunningContender(name, python, Path(folder), num_steps)
            running[name] = stack.enter_context(contender)
            contender.make_round()
            models[name] = contender.model()
            require_same_work(name, models[name], models[OURS], task.network, is_fixed)
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for number in range(repetitions):
            say(f"peers: {title}: round {number + 1} of {repetitions}")
            for name, contender in running.items():
                seconds[name].append(contender.make_round())
        say(f"peers: {title}: rounds in which memory is looked at")
        peaks = {
            name: contender.peak_megabytes() for name, contender in running.items()
        }
    return [
        figures(title, name, Turns(seconds[OURS], seconds[name]), peaks[name])
        for name in running
    ]


def figures(title: str, name: str, turns: Turns, megabytes: float) -> Measurement:
    """Build a contender's line from the seconds of `OURS` and its own."""
    ratios = turns.ratios()
    details: dict[str, object] = {
        "workload": title,
        "contender": name,
        "rounds_per_s": rounded(1 / statistics.median(turns.baselines)),
        "ours_over_this": rounded(statistics.median(ratios)),
        "spread_of_ratio": [rounded(min(ratios)), rounded(max(ratios))],
        "peak_megabytes": rounded(megabytes),
        "command": f"make bench-peers ARGS='--workload {title} --only {name}'",
    }
    baseline_is = f"seconds a round of {OURS}"
    return Measurement("peers", turns.baselines, turns.values, baseline_is, details)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
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
    options = parser().parse_args()
    # Child processes inherit these cores and their number of threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    names = [
        name for name in CONTENDERS if name in (OURS, *(options.only or CONTENDERS))
    ]
    pythons = installed(names, options.environments)
    for title in options.workload or WORKLOADS:
        workload = replace(WORKLOADS[title], images=options.images)
        for line in measure(title, workload, pythons, options.repetitions):
            print(line.as_json(), flush=True)


if __name__ == "__main__":
    main()
