"""Seconds and bytes of rounds with secure aggregation, beside plain rounds.

Virtual clients train an MLP of 9 MB for one step in each round, in one process. Plain
and secure runs take turns. `value` is the time of a secure round over that of a plain
one. The bytes are those of one client in a round: the numbers and the text of its
messages, without Flower's envelope.
"""

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measurement import Measurement, in_turn, make_parser, rounded, say
from knnper.experiment_file import load_experiment, results_identity
from knnper.records import flatten
from knnper.server.checkpoints import CheckpointFolder
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.observer import RoundRecord
from knnper.server.rounds import RoundLoop, untrained
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import Workbench, open_workbench, runtime_of

NUM_ROUNDS = 3
HIDDEN_SIZES = [1460, 1460]  # 2.24 million weights


def bench_of(
    num_clients: int, secure_aggregation: Mapping[str, object] | None
) -> Workbench:
    """Return the virtual clients of a run."""
    document = {
        "name": "secure",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": num_clients},
        "model": {"name": "mlp", "hidden_sizes": HIDDEN_SIZES},
        "training": {
            "num_rounds": NUM_ROUNDS,
            "local_steps": 1,
            "secure_aggregation": secure_aggregation,
        },
        "method": {"name": "fedavg"},
        "run": {"engine": "serial"},
    }
    return open_workbench(load_experiment(document, experiment_catalogue()))


def size_of(record: object) -> int:
    """Return the bytes of a record on its way."""
    if record is None:
        return 0
    flat = flatten(record)
    return int(flat.vector.nbytes) + len(flat.layout)


@dataclass
class Counting(Federation):
    """Counts the bytes of messages on their way to the clients and back."""

    inner: Federation
    num_bytes: Counter[str] = field(default_factory=Counter)

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        """Forward requests and replies."""

        def counted() -> Iterator[Request]:
            for request in requests:
                self.num_bytes["down"] += size_of(request.payload)
                self.num_bytes["down"] += size_of(request.masking)
                yield request

        for reply in self.inner.exchange(step, counted()):
            self.num_bytes["up"] += size_of(reply.record)
            yield reply


def round_seconds(bench: Workbench, num_bytes: Counter[str]) -> float:
    """Return the median seconds of a round; count the bytes of all rounds."""
    records: list[RoundRecord] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        federation = Counting(SerialFederation(runtime_of(bench, folder)))
        identity = results_identity(bench.experiment)
        checkpoints = CheckpointFolder(folder / "checkpoints", identity)
        loop = RoundLoop(bench, federation, bench.roster, checkpoints, records.append)
        loop.train(untrained(bench, bench.roster))
    num_bytes.clear()
    num_bytes.update(federation.num_bytes)
    return statistics.median(float(record["seconds"]) for record in records)


def measure(num_clients: int, protocol: str, repetitions: int) -> Measurement:
    """Measure one protocol with ``num_clients`` clients in each round."""
    plain, secure = (
        bench_of(num_clients, None),
        bench_of(num_clients, {"name": protocol}),
    )
    plain_bytes, secure_bytes = Counter[str](), Counter[str]()
    turns = in_turn(
        lambda: round_seconds(secure, secure_bytes),
        lambda: round_seconds(plain, plain_bytes),
        repetitions,
    )
    per_client = NUM_ROUNDS * num_clients
    return Measurement(
        name="secure_round_ratio",
        values=turns.ratios(),
        baselines=turns.baselines,
        baseline_is="seconds of a plain round",
        details={
            "protocol": protocol,
            "clients": num_clients,
            "model_bytes": plain.task.initial_weights.nbytes,
            "secure_s": rounded(statistics.median(turns.values)),
            "added_s_per_client": rounded(
                statistics.median(turns.differences()) / num_clients
            ),
            **{
                f"{kind}_bytes_{way}": round(counts[way] / per_client)
                for kind, counts in (("plain", plain_bytes), ("secure", secure_bytes))
                for way in ("down", "up")
            },
        },
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20])
    return parser


def main() -> None:
    """Print a line for each protocol and number of clients."""
    options = parser().parse_args()
    for num_clients in options.clients:
        for protocol in ("secagg_plus", "pairwise"):
            say(f"{protocol}, {num_clients} clients")
            measurement = measure(num_clients, protocol, options.repetitions)
            print(measurement.as_json(), flush=True)


if __name__ == "__main__":
    main()
