"""Seconds that `knnper simulate` needs until its first round, beyond Ray's own.

There are 10,000 clients, of which ten take part in a round. The baseline is a script
that starts Ray and hears of two actors. Both are fresh processes, started in turn.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from benchmarks.command import make_parser, say
from benchmarks.measurement import Measurement, in_turn, rounded

NUM_WORKERS = 2
NUM_CLASSES, TRAIN_PER_CLASS, TEST_PER_CLASS = 10, 2000, 10
_COMMAND = "from knnper_cli.app import main; main()"
_POLL_S = 0.02
_TIMEOUT_S = 300.0


def measure(
    root: Path, num_clients: int, repetitions: int, scratch: Path
) -> Measurement:
    """Return the difference of seconds, ours to bare.

    Parameters
    ----------
    root
        A folder of images, as the data set ``image_folder`` takes it.
    num_clients
        They share the images.
    repetitions
        Of both; the first run of all fills the data cache and is not counted.
    scratch
        An empty folder.
    """
    experiment = write_experiment(root, num_clients, scratch)
    turns = in_turn(
        lambda: seconds_to_first_round(experiment, scratch / "run"),
        seconds_of_bare_ray,
        repetitions,
    )
    details: dict[str, object] = {
        "clients": num_clients,
        "seconds": rounded(statistics.median(turns.ours)),
    }
    baseline_is = "seconds until two actors of Ray answer"
    return Measurement(
        "dormant_startup_s", turns.differences(), turns.bare, baseline_is, details
    )


def write_experiment(root: Path, num_clients: int, scratch: Path) -> Path:
    """Write an experiment in which ten clients take part in the only round."""
    document = {
        "name": "dormant",
        "data": {"name": "image_folder", "root": str(root)},
        "partition": {"name": "iid", "num_clients": num_clients},
        "model": {"name": "tiny_cnn"},
        "training": {"num_rounds": 1, "participation": 10 / num_clients},
        "method": {"name": "fedavg"},
        "run": {"num_workers": NUM_WORKERS},
    }
    file = scratch / "experiment.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return file


def write_images(root: Path) -> None:
    """Write random images of 8x8 pixels, two for each of 10,000 clients."""
    rng = np.random.default_rng(0)
    for split, count in (("train", TRAIN_PER_CLASS), ("test", TEST_PER_CLASS)):
        for label in range(NUM_CLASSES):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            pixels = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
            for number, image in enumerate(pixels):
                Image.fromarray(image).save(folder / f"{number}.bmp")


def seconds_to_first_round(experiment: Path, output: Path) -> float:
    """Start the command; return the seconds until its first round began."""
    say("dormant_startup_s: knnper simulate")
    arguments = ["simulate", str(experiment), "--output", str(output), "--overwrite"]
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *arguments], stdout=subprocess.DEVNULL
    )
    try:
        rounds = output / "rounds.jsonl"
        record = _first_record(rounds, process, began)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    # A round's line is written when the round is over.
    return rounds.stat().st_mtime - float(record["seconds"]) - began


def seconds_of_bare_ray() -> float:
    """Start Ray alone; return the seconds until it answers."""
    say("dormant_startup_s: Ray alone")
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.bare_ray"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it is a pipe"
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("Ray did not start; what it said is above")
        return time.time() - began


def _first_record(
    file: Path, process: subprocess.Popen[bytes], began: float
) -> dict[str, float]:
    while time.time() < began + _TIMEOUT_S and process.poll() is None:
        if file.exists() and file.stat().st_mtime >= began:
            text = file.read_text(encoding="utf-8")
            if text.endswith("\n"):
                record: dict[str, float] = json.loads(text.splitlines()[0])
                return record
        time.sleep(_POLL_S)
    raise RuntimeError("knnper simulate made no round; what it said is above")


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--clients", type=int, default=10_000)
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        root = Path(given.images or scratch / "images").absolute()
        if not given.images:
            write_images(root)
            os.environ["KNNPER_CACHE"] = str(scratch / "cache")
        print(measure(root, given.clients, given.repetitions, scratch).as_json())


if __name__ == "__main__":
    main()
