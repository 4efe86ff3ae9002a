"""Reading time, start-up and memory of Hugging Face `datasets` beside our readers.

One line for each format: `value` is the time of `datasets` over the time of our reader
for the first reading of a data set, with an empty cache. Each reading has a process of
its own; both readers take turns. Linux only.
"""

import argparse
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.measurement import (
    Measurement,
    make_parser,
    peak_megabytes,
    rounded,
    say,
    seconds_of,
)

Arrays: TypeAlias = tuple[NDArray[Any], NDArray[np.int64]]
"""Inputs (n, ...) and labels (n,)."""

Reader: TypeAlias = Callable[[Path], Arrays]

NUM_CLASSES = 10
NUM_FEATURES = 50
IMAGE_SIZE = 64
SHARE = 50  # examples of one client
FEATURES = [f"x{number}" for number in range(NUM_FEATURES)]
FORMATS = ("image_folder", "csv", "parquet", "json", "memory_map")


@dataclass(frozen=True)
class CarrierReading:
    """One reading of a data set in a fresh process."""

    import_seconds: float
    seconds: float  # of the first reading, with an empty cache
    again_seconds: float  # of the second reading, with a filled cache
    megabytes: float  # peak memory of the process
    digest: str  # SHA-256 of inputs and labels in the order of reading


def _package(name: str) -> Any:
    """Import a package without types, or one that only one of the readers needs."""
    return importlib.import_module(name)


def write_data(folder: Path, num_images: int, num_rows: int) -> None:
    """Write the same random data in every format."""
    arrow, csv, parquet = map(_package, ("pyarrow", "pyarrow.csv", "pyarrow.parquet"))
    datasets = _package("datasets")
    generator = np.random.default_rng(0)
    shape = (num_images, IMAGE_SIZE, IMAGE_SIZE, 3)
    images = generator.integers(0, 256, shape, dtype=np.uint8)
    for number, image in enumerate(images):
        # Classes take turns, so that every class has as many images as the others.
        picture = folder / f"images/train/{number % NUM_CLASSES}/{number:06d}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(picture)
    test = folder / "images/test"
    for label in range(NUM_CLASSES):
        (test / str(label)).mkdir(parents=True)
        Image.fromarray(255 - images[label]).save(test / str(label) / "0.png")

    rows = generator.normal(size=(num_rows, NUM_FEATURES)).astype(np.float32)
    classes = np.arange(num_rows) % NUM_CLASSES
    columns = dict(zip(FEATURES, rows.T.astype(np.float64), strict=True))
    table = arrow.table({**columns, "label": classes})
    csv.write_csv(table, folder / "rows.csv")
    parquet.write_table(table, folder / "rows.parquet")
    with (folder / "rows.json").open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in table.to_pylist())

    labels = (np.arange(num_images) % NUM_CLASSES).astype(np.int64)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    features = datasets.Features(
        image=datasets.Array3D(shape[1:], "uint8"),
        label=datasets.ClassLabel(num_classes=NUM_CLASSES),
    )
    dataset = datasets.Dataset.from_dict(
        {"image": images, "label": labels}, features=features
    )
    dataset.save_to_disk(str(folder / "arrow"))


def our_image_folder(folder: Path) -> Arrays:
    """Decode an image folder into the data cache."""
    from knnper.data.image_folders import ImageFolderSettings

    data = ImageFolderSettings(root=str(folder / "images")).load().train
    return data.images, data.labels


def their_image_folder(folder: Path) -> Arrays:
    """Decode an image folder with the builder ``imagefolder``."""
    datasets = _package("datasets")
    data = datasets.load_dataset("imagefolder", data_dir=str(folder / "images"))
    train = data["train"]
    images = np.empty((len(train), IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for number, example in enumerate(train):
        images[number] = np.asarray(example["image"].convert("RGB"))
    return images, np.asarray(train["label"], dtype=np.int64)


def our_table(path: Path) -> Arrays:
    """Read all rows of a CSV or Parquet file as features."""
    from knnper.data.columns import ColumnSelection
    from knnper.data.tables import read_table

    return _features_of(read_table(path, ColumnSelection(("label",), tuple(FEATURES))))


def our_json(folder: Path) -> Arrays:
    """Read JSON lines with pyarrow, and the columns as our tables do."""
    from knnper.data.columns import (
        ColumnSelection,
        extract_columns,
        select_number_columns,
    )

    path = folder / "rows.json"
    selection = ColumnSelection(("label",), tuple(FEATURES))
    table = _package("pyarrow.json").read_json(path)
    numbers = select_number_columns(table.schema, selection, path)
    return _features_of(extract_columns(table, selection, numbers, path))


def _features_of(table: Any) -> Arrays:
    labels = np.array(table.texts["label"]).astype(np.int64)
    return table.numbers.astype(np.float32), labels


def their_table(builder: str, file: Path) -> Arrays:
    """Read all rows of a file with a builder of `datasets`, such as ``csv``."""
    datasets = _package("datasets")
    rows = datasets.load_dataset(builder, data_files=str(file))["train"]
    # As Arrow: the formats "numpy" and "torch" take several times as long.
    table = rows.with_format("arrow")[:]
    inputs = np.stack([table.column(name).to_numpy() for name in FEATURES], axis=1)
    labels = table.column("label").to_numpy()
    return inputs.astype(np.float32), labels.astype(np.int64)


def our_memory_map(folder: Path) -> Arrays:
    """Copy the examples of each client out of memory-mapped NumPy files."""
    from knnper.data.examples import LabelledArrays

    data = LabelledArrays(
        np.load(folder / "images.npy", mmap_mode="r"),
        np.load(folder / "labels.npy", mmap_mode="r"),
    )
    parts = [data.examples_at(positions) for positions in _shares(len(data))]
    inputs = np.concatenate([part.images.numpy() for part in parts])
    return inputs, np.concatenate([part.labels.numpy() for part in parts])


def their_memory_map(folder: Path) -> Arrays:
    """Copy the examples of each client out of a memory-mapped Arrow file."""
    datasets = _package("datasets")
    data = datasets.load_from_disk(str(folder / "arrow")).with_format("numpy")
    parts = [data[positions] for positions in _shares(len(data))]
    # The numpy format of the package makes int64 of all whole numbers.
    inputs = np.concatenate([part["image"].astype(np.uint8) for part in parts])
    return inputs, np.concatenate([part["label"] for part in parts])


def _shares(count: int) -> list[NDArray[np.int64]]:
    order = np.random.default_rng(1).permutation(count)
    return [order[start : start + SHARE] for start in range(0, count, SHARE)]


READERS: Mapping[str, Mapping[str, Reader]] = {
    "ours": {
        "image_folder": our_image_folder,
        "csv": lambda folder: our_table(folder / "rows.csv"),
        "parquet": lambda folder: our_table(folder / "rows.parquet"),
        "json": our_json,
        "memory_map": our_memory_map,
    },
    "datasets": {
        "image_folder": their_image_folder,
        "csv": lambda folder: their_table("csv", folder / "rows.csv"),
        "parquet": lambda folder: their_table("parquet", folder / "rows.parquet"),
        "json": lambda folder: their_table("json", folder / "rows.json"),
        "memory_map": their_memory_map,
    },
}


def read_here(carrier: str, data_format: str, folder: Path) -> CarrierReading:
    """Read twice in this process."""

    def load_packages() -> None:
        if carrier == "datasets":
            datasets = _package("datasets")
            datasets.disable_progress_bars()
        else:
            for module in ("compute", "csv", "json", "parquet", "types"):
                _package(f"pyarrow.{module}")
            _package("knnper.data.catalogue")

    import_seconds = seconds_of(load_packages)
    arrays: list[Arrays] = []
    read = READERS[carrier][data_format]
    seconds, again_seconds = (
        seconds_of(lambda: arrays.append(read(folder))) for _ in range(2)
    )
    digest = hashlib.sha256()
    for array in arrays[-1]:
        digest.update(np.ascontiguousarray(array).data)
    return CarrierReading(
        import_seconds, seconds, again_seconds, peak_megabytes(), digest.hexdigest()
    )


def read_in_process(carrier: str, data_format: str, folder: Path) -> CarrierReading:
    """Read in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.data_carrier"),
                *("--read", carrier, "--format", data_format, "--folder", str(folder)),
            ],
            stdout=subprocess.PIPE,
            check=True,
            env={
                **os.environ,
                "KNNPER_CACHE": cache,
                "HF_DATASETS_CACHE": cache,
                "HF_HUB_OFFLINE": "1",
            },
        )
    return CarrierReading(**json.loads(ended.stdout))


def measure(data_format: str, folder: Path, repetitions: int) -> Measurement:
    """Compare both readers of one format; the first turn only warms up."""
    our_readings: list[CarrierReading] = []
    their_readings: list[CarrierReading] = []
    for number in range(repetitions + 1):
        say(f"data_carrier: {data_format}, repetition {number} of {repetitions}")
        our_readings.append(read_in_process("ours", data_format, folder))
        their_readings.append(read_in_process("datasets", data_format, folder))
    our_readings, their_readings = our_readings[1:], their_readings[1:]
    pairs = list(zip(our_readings, their_readings, strict=True))
    details: dict[str, object] = {"format": data_format}
    for carrier, readings in (("ours", our_readings), ("datasets", their_readings)):
        for figure in ("import_seconds", "seconds", "again_seconds", "megabytes"):
            median = statistics.median(getattr(reading, figure) for reading in readings)
            details[f"{carrier}_{figure}"] = rounded(median)
    details["same_bits"] = (
        len({reading.digest for reading in (*our_readings, *their_readings)}) == 1
    )
    return Measurement(
        "data_carrier",
        [their.seconds / our.seconds for our, their in pairs],
        [our.seconds for our in our_readings],
        "seconds of our reader; the value is a ratio to it",
        details,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument("--num-images", type=int, default=3000)
    parser.add_argument("--num-rows", type=int, default=50_000)
    parser.add_argument("--format", choices=FORMATS, help="default: all")
    parser.add_argument("--read", choices=tuple(READERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="folder for the data to be read")
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    if options.read:
        reading = read_here(options.read, options.format, options.folder)
        print(json.dumps(asdict(reading)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        say("data_carrier: writing the data")
        write_data(Path(folder), options.num_images, options.num_rows)
        for data_format in [options.format] if options.format else FORMATS:
            figures = measure(data_format, Path(folder), options.repetitions)
            print(figures.as_json(), flush=True)


if __name__ == "__main__":
    main()
