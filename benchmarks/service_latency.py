"""Milliseconds of one prediction by a client's service.

A client stores 5,000 images of 32x32 pixels. `service_prediction_ratio` is the time for
one image in process (embedding, search of neighbours, vote and mixture, with the data
of an explanation) as a multiple of a forward pass of the same network in plain torch.
``over_bare_memory`` is a multiple of that pass with a FAISS search and a vote.
`service_http_ms` is the additional time of a request with a PNG image over a kept
connection on loopback to a separate process. All ways take turns.
"""

import argparse
import http.client
import io
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import faiss
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.bare_model import bare_network, halves
from benchmarks.bare_personalization import EMBEDDED_AT_ONCE, vote
from benchmarks.measurement import Measurement, Turns, make_parser, rounded, say
from benchmarks.store import IMAGE, NUM_CLASSES
from benchmarks.workload import Workload
from knnper.client.served_model import ServedModel, open_served
from knnper.client.service.app import make_service
from knnper.client.service.server import serve
from knnper.client.settings import ServiceSettings
from knnper.client.site_state import SiteState
from knnper.data.examples import Examples, InputSpec
from knnper.data.site_data import NamedExamples, SiteData
from knnper.data.site_task import SiteTask
from knnper.datastore.memory import KnnSettings
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.assembly import assemble
from knnper.strategies.core.exported_model import GlobalModel, global_model

MODELS = ("mobilenet_v2", "leaf_cnn")
CLIENT = "benchmark"
SITE = SiteTask(
    InputSpec(IMAGE, NUM_CLASSES, (0.5,) * 3, (0.25,) * 3),
    tuple(str(label) for label in range(NUM_CLASSES)),
)

Ways = tuple[Callable[[Tensor], object], ...]


def measure(
    name: str, index: str, num_examples: int, num_questions: int, repetitions: int
) -> list[Measurement]:
    """Measure the ratio of a prediction and the overhead of HTTP for one model."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    chosen = Workload(1, model=name).experiment().model
    say(f"service_latency: {name} remembers {num_examples} images")
    with tempfile.TemporaryDirectory(prefix="knnper-service-") as folder:
        state = Path(folder) / "state"
        model = untrained(name, index)
        data = SiteData(drawn(num_examples), drawn(0), drawn(0), SITE)
        SiteState(state, CLIENT).install(model, data, took_part=False)
        # Each has its own folder to write to, like a service.
        copy = shutil.copytree(state, Path(folder) / "in process")
        images = drawn(num_questions, seed=1).examples.images
        network = bare_network(chosen, SITE.spec).eval()
        bare = BareMemory(network, model.task.normalize, data.train.examples)
        with (
            service(state) as address,
            closing(open_served(SiteState(copy, CLIENT))) as served,
        ):
            timings = [
                _in_turn(served, bare, address, images) for _ in range(repetitions + 1)
            ][1:]
    details: dict[str, object] = {
        "model": name,
        "index": index,
        "examples": num_examples,
        "embedding_dim": model.embedding_dim,
    }
    return [_ratio(timings, details), _added_by_http(timings, details)]


class BareMemory:
    """kNN-Per with an exact search in plain torch and FAISS; λ is 0.5."""

    def __init__(
        self,
        network: nn.Module,
        normalize: Callable[[Tensor], Tensor],
        stored: Examples,
    ) -> None:
        self._normalize, self._labels = normalize, stored.labels
        self._embed, self._head = halves(network)
        with torch.inference_mode():
            parts = torch.split(stored.images, EMBEDDED_AT_ONCE)
            embeddings = torch.cat([self._embed(normalize(part)) for part in parts])
        self._index = faiss.IndexFlatL2(embeddings.shape[1])
        self._index.add(embeddings.numpy())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the embedding (1, p) and the network's probabilities (1, c)."""
        with torch.inference_mode():
            embedding = self._embed(self._normalize(image))
            return embedding, torch.softmax(self._head(embedding), dim=1)

    def predict(self, image: Tensor) -> Tensor:
        """Compute the served probabilities, shape (1, c)."""
        embedding, probabilities = self.forward(image)
        count, num_classes = KnnSettings().num_neighbors, probabilities.shape[1]
        votes = vote(self._index, embedding.numpy(), self._labels, count, num_classes)
        return (votes + probabilities) / 2


@dataclass(frozen=True)
class Timings:
    """Medians of one repetition in seconds."""

    bare: float
    bare_memory: float
    prediction: float
    as_png: float
    as_numbers: float


def _in_turn(
    served: ServedModel, bare: BareMemory, address: str, images: Tensor
) -> Timings:
    """Send each image to all ways, in random order.

    The previous way determines the content of the processor's cache.
    """
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    ways: Ways = (
        bare.forward,
        bare.predict,
        served.predict,
        lambda image: _ask(connection, "image/png", _png(image)),
        lambda image: _ask(connection, "application/json", _numbers(image)),
    )
    with closing(connection):
        rng = RandomKey(0, ("order",)).numpy()
        seconds = [
            _seconds_of_each(ways, image, rng.permutation(len(ways)).tolist())
            for image in images[:, None]
        ]
    return Timings(
        *(statistics.median(column) for column in zip(*seconds, strict=True))
    )


def _seconds_of_each(ways: Ways, image: Tensor, order: list[int]) -> list[float]:
    """Measure the seconds of each way."""
    seconds = {place: _seconds(ways[place], image) for place in order}
    return [seconds[place] for place in range(len(ways))]


def _seconds(way: Callable[[Tensor], object], image: Tensor) -> float:
    began = time.perf_counter()
    way(image)
    return time.perf_counter() - began


def _ask(connection: http.client.HTTPConnection, kind: str, body: bytes) -> None:
    connection.request("POST", "/predict", body, {"Content-Type": kind})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == http.HTTPStatus.OK, content


def _png(image: Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(file, "PNG")
    return file.getvalue()


def _numbers(image: Tensor) -> bytes:
    return json.dumps({"inputs": image.tolist()}).encode()


def _ratio(timings: list[Timings], details: dict[str, object]) -> Measurement:
    predictions = [timing.prediction for timing in timings]
    turns = Turns(predictions, [timing.bare for timing in timings])
    over_bare = Turns(predictions, [timing.bare_memory for timing in timings]).ratios()
    return Measurement(
        "service_prediction_ratio",
        turns.ratios(),
        turns.baselines,
        "seconds of a bare forward pass",
        {
            **details,
            "ms_in_process": _milliseconds(turns.values),
            "over_bare_memory": rounded(statistics.median(over_bare)),
        },
    )


def _added_by_http(timings: list[Timings], details: dict[str, object]) -> Measurement:
    base = [1000 * timing.prediction for timing in timings]
    as_png = Turns([1000 * timing.as_png for timing in timings], base)
    as_numbers = Turns([1000 * timing.as_numbers for timing in timings], base)
    added = rounded(statistics.median(as_numbers.differences()))
    return Measurement(
        "service_http_ms",
        as_png.differences(),
        base,
        "ms of a prediction in process",
        {**details, "ms_added_with_numbers_in_json": added},
    )


def _milliseconds(seconds: Sequence[float]) -> float:
    return rounded(1000 * statistics.median(seconds))


def index_section(index: str) -> dict[str, str]:
    """Return the settings of an index: flat, or a string of `faiss.index_factory`."""
    if index == "flat":
        return {"name": "flat"}
    return {"name": "factory", "factory": index}


def untrained(name: str, index: str) -> GlobalModel:
    """Return an untrained model."""
    document = {
        "name": "benchmark",
        "data": {"name": "digits"},  # not read
        "partition": {"name": "iid", "num_clients": 1},
        "model": {"name": name},
        "method": {"name": "knn_per"},
        "personalization": {
            "knn_weights": [0.5],
            "store": {"index": index_section(index)},
        },
        "run": {"engine": "serial"},
    }
    experiment = load_experiment(document, experiment_catalogue())
    task = assemble(experiment, SITE.spec).task
    return global_model(experiment, task, SITE, task.initial_weights)


def drawn(count: int, seed: int = 0) -> NamedExamples:
    """Return random images."""
    generator = RandomKey(seed, ("service",)).numpy()
    images = generator.integers(0, 256, (count, *IMAGE), "uint8")
    labels = generator.integers(0, NUM_CLASSES, count)
    examples = Examples(torch.from_numpy(images), torch.from_numpy(labels))
    names = tuple(f"{seed}/{count}/{number:05d}" for number in range(count))
    return NamedExamples(examples, names)


@contextmanager
def service(state: Path) -> Iterator[str]:
    """Yield the address of a service in a separate process."""
    context = multiprocessing.get_context("spawn")
    listening, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(state, sender))
    process.start()
    try:
        address = listening.recv()
        _wait_until_ready(address)
        yield address
    finally:
        process.terminate()
        process.join()


def _serve(state: Path, sender: Connection) -> None:
    torch.set_num_threads(1)
    site_state = SiteState(state, CLIENT)
    app = make_service(CLIENT, lambda: open_served(site_state), tokens=None)
    serve(app, ServiceSettings(port=0), sender.send)


def _wait_until_ready(address: str) -> None:
    place = urlsplit(address)
    with closing(
        http.client.HTTPConnection(place.hostname or "", place.port)
    ) as connection:
        while True:
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            answer.read()
            if answer.status == http.HTTPStatus.OK:
                return
            time.sleep(0.05)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument(
        "--index", default="flat", help="flat, or a string of faiss.index_factory"
    )
    parser.add_argument("--questions", type=int, default=100)
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    for name in MODELS:
        figures = measure(
            name,
            options.index,
            options.examples,
            options.questions,
            options.repetitions,
        )
        for figure in figures:
            print(figure.as_json(), flush=True)


if __name__ == "__main__":
    main()
