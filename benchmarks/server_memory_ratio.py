"""Peak memory of the server with many replies of 9 MB in a round, over that with few.

The server makes two rounds in a fresh process, with clients that only return the
MobileNetV2 they are sent. The baseline is the same ratio of Flower's FedAvg for ten
times the clients, at smaller numbers: it keeps all replies. Linux only.
"""

import argparse
import statistics
from dataclasses import dataclass, replace

from benchmarks.measurement import Measurement, make_parser, rounded, say
from benchmarks.server_process import Peaks, peaks_of
from benchmarks.workload import Workload


@dataclass(frozen=True)
class _Pair:
    """The peaks with few clients and with ten times as many."""

    few: Peaks
    many: Peaks

    @property
    def ratio(self) -> float:
        return self.many.end / self.few.end


def measure(
    workload: Workload, num_stock: int, num_trivial: int, repetitions: int
) -> Measurement:
    """Return the ratio of the peaks.

    Parameters
    ----------
    workload
        The many clients; the few are a tenth.
    num_stock
        The many clients of Flower's FedAvg.
    num_trivial
        Clients with a trivial model, measured once; 0 leaves them out.
    repetitions
        Of both ratios.
    """
    ours: list[_Pair] = []
    theirs: list[_Pair] = []
    for _ in range(repetitions):
        ours.append(_pair(workload, is_stock=False))
        theirs.append(_pair(replace(workload, num_clients=num_stock), is_stock=True))
    baseline_is = f"the ratio of FedAvg.start with {num_stock} to {num_stock // 10}"
    return Measurement(
        "server_memory_ratio",
        [pair.ratio for pair in ours],
        [pair.ratio for pair in theirs],
        baseline_is,
        {
            **_details("ours", workload.num_clients, ours),
            **_details("baseline", num_stock, theirs),
            **_trivial(num_trivial),
        },
    )


def _pair(many: Workload, *, is_stock: bool) -> _Pair:
    few = replace(many, num_clients=many.num_clients // 10)
    return _Pair(_peaks(few, is_stock=is_stock), _peaks(many, is_stock=is_stock))


def _peaks(workload: Workload, *, is_stock: bool = False) -> Peaks:
    whose = "Flower's FedAvg" if is_stock else "ours"
    say(f"server_memory_ratio: {workload.num_clients} clients, {whose}")
    return peaks_of(workload, is_stock=is_stock)


def _details(whose: str, num_many: int, pairs: list[_Pair]) -> dict[str, object]:
    by_number = {
        num_many // 10: [pair.few for pair in pairs],
        num_many: [pair.many for pair in pairs],
    }
    return {
        f"{whose}_megabytes": {
            str(number): _megabytes(peaks) for number, peaks in by_number.items()
        }
    }


def _megabytes(peaks: list[Peaks]) -> dict[str, float]:
    return {
        "peak": rounded(statistics.median(one.end for one in peaks)),
        "growth": rounded(statistics.median(one.growth for one in peaks)),
    }


def _trivial(num_clients: int) -> dict[str, object]:
    if num_clients == 0:
        return {}
    workload = Workload(num_clients, model="tiny_cnn", embedding_dim=1, echoes=True)
    peaks = [_peaks(workload)]
    return {"trivial_megabytes": {str(num_clients): _megabytes(peaks)}}


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=1)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--stock-clients", type=int, default=100)
    parser.add_argument(
        "--trivial-clients",
        type=int,
        default=0,
        help="measure as many clients with a trivial model too (default: none)",
    )
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    workload = Workload(given.clients, echoes=True, images=given.images)
    figures = measure(
        workload, given.stock_clients, given.trivial_clients, given.repetitions
    )
    print(figures.as_json())


if __name__ == "__main__":
    main()
