"""With default settings no example, embedding, file name or label count leaves a site.

A site answers every kind of message through the real ClientApp and Flower's encoder,
for each method. All bytes that leave are searched for what was planted in its data.
`tests/federation/test_wire_privacy.py` does it with the sockets of real processes.
"""

import base64
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supernode.runtime import run_clientapp
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from knnper.cli.flower_apps import client_app
from knnper.client import site as site_module
from knnper.client import site_runtime
from knnper.client.settings import read_client
from knnper.client.site import site_data
from knnper.data.examples import ClientData
from knnper.data.normalization import Normalizer
from knnper.data.site_data import SiteData
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.networks import Mlp, TinyCnn
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS, for_sites
from knnper.strategies.core.assembly import assemble
from knnper.strategies.core.evaluation import ClientResults
from knnper.strategies.core.exported_model import global_model
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.transport import messages
from knnper.transport.messages import Job, Purpose, pack, packed_of, to_content, unpack
from tests.planted_values import PlantedValues

pytestmark = pytest.mark.usefixtures("inside_a_run")
ROOT = Path(__file__).parents[2]
CLIENT, OTHERS, NODE = "site-a", ("b", "c", "d", "e"), 10
MARKER = "Zacharias"  # in the name of each file
CLASSES = ("ant", "bee", "cat", "dog")
NUM_OF_CLASS = (47, 31, 19, 13)
KINDS_OF_COUNTS = ("i2", "i4", "i8", "f4", "f8")
# They document what they send, and need a site that shares metrics.
SENDING_STATISTICS = {name for name, method in METHODS.items() if method.needs_metrics}
PRIVATE = sorted({*METHODS} - SENDING_STATISTICS)


class RecordingLink:
    """Stands for the node's connection to its server, and keeps what is pushed."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def PushMessages(self, request: Any) -> Any:
        self.bodies.append(request.SerializeToString())
        (tree,) = request.message_object_trees
        return SimpleNamespace(objects_to_push=list(_ids(tree)), session_id="")

    def PushObject(self, request: Any) -> Any:
        self.bodies.append(request.SerializeToString())
        return SimpleNamespace(stored=True)


def _ids(tree: Any) -> Iterator[str]:
    yield tree.object_id
    for child in tree.children:
        yield from _ids(child)


@dataclass
class Site:
    """A site, what it has sent, and the embeddings that it has computed."""

    file: Path
    run: int
    link: RecordingLink = field(default_factory=RecordingLink)
    embeddings: list[Tensor] = field(default_factory=list)

    def ask(self, purpose: Purpose, job: Job | None, **records: object) -> Message:
        """Send a request; record the reply's bytes, and return it."""
        packed = {name: pack(record) for name, record in records.items()}
        content = to_content(job, packed)
        context = Context(self.run, NODE, {"config": str(self.file)}, RecordDict(), {})
        reply = client_app(Message(content, NODE, purpose.value), context)
        # As the runner of the node does.
        run_clientapp.push_message(self.link, reply, context)  # type: ignore[arg-type]
        return reply


def write_site(folder: Path, **settings: object) -> Path:
    """Write a site of images of noise; the names of their files are private."""
    rng = np.random.default_rng(0)
    for label, count in zip(CLASSES, NUM_OF_CLASS, strict=True):
        place = folder / "data" / label
        place.mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{MARKER}-{label}-{number}.png")
    described = {
        "name": CLIENT,
        "server": "127.0.0.1:1",
        "insecure": True,
        "limits": {"training_rounds": None, "validation_rounds": None},
        "data": {"name": "image_folder", "path": "data"},
        **settings,
    }
    file = folder / "client.yaml"
    file.write_text(yaml.safe_dump(described))
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def site(file: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return the site in a new run, in a process that keeps all embeddings."""
    recording_site = Site(file, run=next(_RUNS))
    for network in (Mlp, TinyCnn):
        embed = network.embed

        def kept(model: Any, x: Tensor, embed: Callable[..., Tensor] = embed) -> Tensor:
            embeddings = embed(model, x)
            if not torch._C._functorch.is_functorch_wrapped_tensor(embeddings):
                recording_site.embeddings.append(embeddings.detach().clone())
            return embeddings

        monkeypatch.setattr(network, "embed", kept)
    return recording_site


_RUNS = iter(range(1, 10_000))


@functools.cache
def experiment(method: str) -> Experiment:
    """Return an experiment with the defaults of a method, and a small model."""
    model: dict[str, Any] = {"name": "mlp", "hidden_sizes": [16, 16]}
    if method in ("fedbn", "heterofl"):
        norm = "batch" if method == "fedbn" else "none"
        model = {"name": "tiny_cnn", "embedding_dim": 128, "norm": norm}
    training: dict[str, Any] = {"num_rounds": 2, "batch_size": 16}
    if method == "afl":
        model["trained"] = "head"
        training["num_rounds"] = 1
    document = {
        "name": "wire",
        "data": {
            "name": "sites",
            "image_shape": [8, 8, 1],
            "class_names": list(CLASSES),
            "mean": [0.5],
            "std": [0.25],
        },
        "partition": {"name": "sites"},
        "model": model,
        "training": training,
        "method": {"name": method},
        "run": {"seed": 0},
    }
    return load_experiment(document, experiment_catalogue())


def round_trip(site: Site, method_name: str) -> None:
    """Let the site answer all messages of a run, from its introduction on."""
    agreed = experiment(method_name)
    data: Any = agreed.data.settings
    assembly = assemble(agreed, data.task().spec)
    method, key, text = assembly.method, assembly.key, for_sites(agreed)

    def job(server_round: int, **more: Any) -> Job:
        rounds = [max(server_round - 1, 0)]
        return Job([CLIENT], server_round, rounds, text, state_rounds=rounds, **more)

    # 1. Introductions, without a run and in one.
    require_answer(site.ask(Purpose.INTRODUCE, None))
    require_answer(site.ask(Purpose.INTRODUCE, job(0)))
    # 2. Training; the others send what this site does.
    state = method.init([CLIENT, *OTHERS], key.child("init"))
    for server_round in range(1, method.num_rounds + 1):
        payload = method.broadcast(state, CLIENT, key.child(server_round))
        reply = site.ask(Purpose.TRAIN, job(server_round), payload=payload)
        update = unpack(method.update_type, required(reply))
        # Widths differ in HeteroFL.
        names = (CLIENT,) if method_name == "heterofl" else (CLIENT, *OTHERS)
        state = method.aggregate(state, iter([(name, update) for name in names]))
    # 3. Validation, and the model distribution.
    payload = method.broadcast(state, CLIENT, key.child("last"))
    reference = method.broadcast(state, UNSEEN_CLIENT, key.child("unseen"))
    last = job(method.num_rounds + 1)
    for purpose in (Purpose.VALIDATE, Purpose.PERSONALIZE):
        required(site.ask(purpose, last, payload=payload, reference=reference))


def required(reply: Message) -> Any:
    require_answer(reply)
    packed = packed_of(reply.content, "reply")
    assert packed is not None
    return packed


def require_answer(reply: Message) -> None:
    assert not reply.has_error(), reply.error.reason


# The search


def as_numbers(images: Tensor, spec: Any) -> dict[str, NDArray[Any]]:
    """Return images in the forms in which a program may hold them."""
    pixels = images.numpy()
    normalized = np.ascontiguousarray(Normalizer(spec)(images).numpy())
    return {
        "bytes": pixels,
        "float32": pixels.astype(np.float32),
        "float64": pixels.astype(np.float64),
        "of up to 1": (pixels / 255).astype(np.float32),
        "normalised": normalized,
        "normalised float64": normalized.astype(np.float64),
    }


def as_texts(images: Tensor) -> dict[str, Sequence[bytes]]:
    """Return parts of images as text: in base64, hexadecimal, and as lists."""
    rows = images.reshape(len(images), -1).numpy()
    raw = [row.tobytes() for row in rows]
    return {
        # Whole groups of three bytes, from each of the three possible beginnings.
        "base64": [
            base64.b64encode(row[start : start + 24])
            for row in raw
            for start in (0, 1, 2)
        ],
        "hexadecimal": [row[:16].hex().encode() for row in raw],
        "list": [str(row[:8].tolist())[1:-1].encode() for row in rows],
        "short list": [",".join(map(str, row[:8].tolist())).encode() for row in rows],
    }


def label_counts(data: SiteData) -> list[NDArray[np.int64]]:
    """Return the number of examples of each label, in each split and together."""
    labels = [
        split.examples.labels.numpy()
        for split in (data.train, data.validation, data.test)
    ]
    splits = [*labels, np.concatenate(labels[:2]), np.concatenate(labels)]
    return [np.bincount(split, minlength=len(CLASSES)) for split in splits]


@dataclass(frozen=True)
class Planted:
    """The private values of a site's data, in all forms that the search covers.

    Attributes
    ----------
    numbers
        By form.
    texts
        Parts of images as text, by form; names of files.
    counts
        Numbers of examples by label.
    """

    numbers: Mapping[str, PlantedValues]
    texts: Mapping[str, Sequence[bytes]]
    counts: Sequence[NDArray[np.int64]]

    @classmethod
    def of(cls, data: SiteData) -> "Planted":
        splits = (data.train, data.validation, data.test)
        images = torch.cat([split.examples.images for split in splits])
        forms = as_numbers(images, data.task.spec)
        encoded = base64.b64encode(f"..{MARKER}".encode())[4:12]
        counts = label_counts(data)
        shares = np.stack(counts) / np.stack(counts).sum(axis=1, keepdims=True)
        share_forms = {
            f"label shares, {kind.__name__}": PlantedValues(
                shares.astype(kind), window=len(CLASSES)
            )
            for kind in (np.float32, np.float64)
        }
        return cls(
            {form: PlantedValues(values) for form, values in forms.items()}
            | share_forms,
            {**as_texts(images), "file names": [MARKER.encode(), encoded]},
            counts,
        )

    def leaks(self, bodies: Sequence[bytes], embeddings: Iterable[Tensor]) -> set[str]:
        """Return the forms in which the bodies hold something private."""
        whole = b"\n".join(bodies)
        numbers = {**self.numbers, **as_planted(embeddings)}
        return {
            *(form for form, planted in numbers.items() if planted.count_in([whole])),
            *(
                form
                for form, parts in self.texts.items()
                if any(part in whole for part in parts)
            ),
            *(form for counts in self.counts for form in _forms_of(counts, whole)),
        }


def as_planted(embeddings: Iterable[Tensor]) -> dict[str, PlantedValues]:
    """Return embeddings, each of shape (n, p), in the forms that the search covers."""
    by_width: dict[int, list[Tensor]] = {}
    for batch in embeddings:
        by_width.setdefault(batch.shape[-1], []).append(batch)
    planted = {}
    for width, batches in by_width.items():
        values = torch.cat(batches).numpy()
        planted[f"embeddings of {width}"] = PlantedValues(values)
        doubled = PlantedValues(values.astype(np.float64))
        planted[f"float64 embeddings of {width}"] = doubled
    return planted


def _forms_of(counts: NDArray[np.int64], whole: bytes) -> Iterator[str]:
    """Yield the forms in which bytes hold the counts of labels."""
    for kind in KINDS_OF_COUNTS:
        if counts.astype(kind).tobytes() in whole:
            yield f"label counts, {kind}"
    between = rb"(?:\.0)?\D{1,24}?"
    numbers = between.join(b"%d" % count for count in counts)
    # Other counts, as of a calibration, can also be small numbers.
    if min(counts) >= 5 and re.search(rb"\b" + numbers + rb"\b", whole):
        yield "label counts, text"


# The tests


@pytest.fixture(scope="module")
def planted(file: Path) -> Planted:
    data, _ = site_data(read_client(file), experiment("fedavg"))
    return Planted.of(data)


def require_nothing_private(site: Site, planted: Planted) -> None:
    assert all(len(values) >= 4 for values in planted.numbers.values())
    assert planted.leaks(site.link.bodies, site.embeddings) == set()


@pytest.mark.parametrize("name", PRIVATE)
def test_nothing_private_leaves_a_site(site: Site, planted: Planted, name: str) -> None:
    round_trip(site, name)
    assert len(site.embeddings) > 2, "they are recorded"
    assert sum(map(len, site.link.bodies)) > 2000
    require_nothing_private(site, planted)


def test_nothing_private_leaves_a_site_that_joins_late(
    tmp_path: Path, site: Site, planted: Planted
) -> None:
    """It installs the model, serves it from then on, and reports its accuracy."""
    site = replace(site, file=write_site(tmp_path))
    agreed = experiment("knn_per")
    data: Any = agreed.data.settings
    assembly = assemble(agreed, data.task().spec)
    weights = assembly.task.initial_weights
    model = global_model(agreed, assembly.task, data.task(), weights)
    job = Job(
        *([CLIENT], 2, [0], for_sites(agreed)),
        model=model.fingerprint,
        seen=False,
        state_rounds=[0],
    )
    payload = ModelPayload(weights)
    reply = site.ask(Purpose.PERSONALIZE, job, payload=payload, reference=payload)
    results = unpack(ClientResults, required(reply))
    assert results.results[0].personal.num_examples > 0
    assert (tmp_path / "state" / "serving.json").exists()
    require_nothing_private(site, planted)


def test_nothing_private_leaves_in_errors(
    tmp_path: Path, site: Site, planted: Planted
) -> None:
    site = replace(site, file=write_site(tmp_path))
    (broken,) = (tmp_path / "data" / "cat").glob("*-3.png")
    broken.write_bytes(broken.read_bytes()[:60])
    agreed = experiment("fedavg")
    data: Any = agreed.data.settings
    assembly = assemble(agreed, data.task().spec)
    payload = ModelPayload(assembly.task.initial_weights)
    job = Job([CLIENT], 1, [0], for_sites(agreed), state_rounds=[0])
    site.ask(Purpose.INTRODUCE, job)
    for purpose in (Purpose.TRAIN, Purpose.VALIDATE, Purpose.PERSONALIZE):
        reply = site.ask(purpose, job, payload=payload, reference=payload)
        assert "(unreadable_examples)" in str(reply.error.reason)
    require_nothing_private(site, planted)


@pytest.mark.parametrize("name", sorted(SENDING_STATISTICS))
def test_statistics_are_documented_and_need_shared_metrics(
    tmp_path: Path, site: Site, planted: Planted, name: str
) -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert f"methods/{name}.md)" in page.partition("## The settings")[0]
    site = replace(site, file=write_site(tmp_path, share_metrics=False))
    with pytest.raises(AssertionError, match="share_metrics: false"):
        round_trip(site, name)
    require_nothing_private(site, planted)


# The search finds what leaves on purpose


@pytest.fixture(scope="module")
def leaked(file: Path) -> dict[str, bytes]:
    """Return an example, its embedding and the labels, in each form."""
    data, _ = site_data(read_client(file), experiment("fedavg"))
    image = data.train.examples.images[7:8]
    counts = label_counts(data)[0]
    numbers = as_numbers(image, data.task.spec)
    by_kind = {kind: counts.astype(kind).tobytes() for kind in KINDS_OF_COUNTS}
    shares = counts / counts.sum()
    row = image.flatten().tolist()
    return {
        **{form: values.tobytes() for form, values in numbers.items()},
        "base64": base64.b64encode(b"12" + image.numpy().tobytes()),
        "hexadecimal": image.numpy().tobytes().hex().encode(),
        "list": json.dumps(row).encode(),
        "short list": json.dumps(row, separators=(",", ":")).encode(),
        "file names": f"/data/{MARKER}-ant-7.png".encode(),
        **{f"label counts, {kind}": content for kind, content in by_kind.items()},
        "label counts, text": json.dumps(
            dict(zip(CLASSES, counts.tolist(), strict=True))
        ).encode(),
        "label shares, float32": shares.astype(np.float32).tobytes(),
        "label shares, float64": shares.tobytes(),
    }


FORMS = (
    *("bytes", "float32", "float64", "of up to 1", "normalised", "normalised float64"),
    *("base64", "hexadecimal", "list", "short list", "file names"),
    *(f"label counts, {kind}" for kind in KINDS_OF_COUNTS),
    *("label counts, text", "label shares, float32", "label shares, float64"),
)


@pytest.mark.parametrize("form", FORMS)
def test_search_finds_each_form_in_an_introduction(
    site: Site,
    planted: Planted,
    leaked: dict[str, bytes],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaking(introduction: messages.Introduction) -> RecordDict:
        content = messages.introduction_content(introduction)
        content["leak"] = ConfigRecord({"bytes": b"x" + leaked[form]})
        return content

    monkeypatch.setattr(site_module, "introduction_content", leaking)
    site.ask(Purpose.INTRODUCE, None)
    assert form in planted.leaks(site.link.bodies, [])


def of_image(method: Method, update: ModelUpdate, data: ClientData) -> Tensor:
    del update
    return method.task.normalize(data.train.images[3:4]).flatten()


def of_embedding(method: Method, update: ModelUpdate, data: ClientData) -> Tensor:
    predictor = ModelPredictor(method.task, update.weights)
    return predictor.embed(data.train.images[3:4]).flatten()


def of_counts(method: Method, update: ModelUpdate, data: ClientData) -> Tensor:
    del method, update
    return torch.bincount(data.train.labels, minlength=len(CLASSES)).float()


def of_shares(method: Method, update: ModelUpdate, data: ClientData) -> Tensor:
    return of_counts(method, update, data) / len(data.train)


@pytest.mark.parametrize(
    ("leak", "form"),
    [
        (of_image, "normalised"),
        (of_embedding, "embeddings of 16"),
        (of_counts, "label counts, f4"),
        (of_shares, "label shares, float32"),
    ],
)
def test_search_finds_leak_of_a_method(
    site: Site,
    planted: Planted,
    leak: Callable[[Method, ModelUpdate, ClientData], Tensor],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = Method.client_update

    def leaking(
        method: Method, payload: Any, state: Any, data: ClientData, *args: Any
    ) -> Any:
        state, update = train(method, payload, state, data, *args)
        values = leak(method, update, data)
        weights = update.weights.clone()
        weights[5 : 5 + len(values)] = values
        return state, replace(update, weights=weights)

    monkeypatch.setattr(Method, "client_update", leaking)
    round_trip(site, "fedavg")
    assert planted.leaks(site.link.bodies, site.embeddings) == {form}


def test_search_finds_label_counts_among_chosen_parameters(
    site: Site, planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = planted.counts[0].tolist()
    chosen = dict(zip(CLASSES, map(float, counts), strict=True))
    monkeypatch.setattr(ModelPredictor, "describe", lambda _: chosen)
    round_trip(site, "fedavg")
    assert planted.leaks(site.link.bodies, []) == {"label counts, text"}


def test_search_finds_file_name_in_an_error(
    tmp_path: Path, site: Site, planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = replace(site, file=write_site(tmp_path))
    (tmp_path / "data" / "cat" / f"{MARKER}-cat-3.png").write_bytes(b"no picture")
    monkeypatch.setattr(site_runtime, "text_for_others", str)
    job = Job([CLIENT], 0, [0], for_sites(experiment("fedavg")))
    site.ask(Purpose.INTRODUCE, job)
    assert planted.leaks(site.link.bodies, []) == {"file names"}
