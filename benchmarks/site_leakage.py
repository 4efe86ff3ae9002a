"""Data that a malicious server extracts from a site, at several settings of the site.

The site is client 0000 of the tutorial on deployment, with 239 training images of
digits, 8x8 pixels. The server may send anything; the unmodified client answers. An
image counts as extracted exactly, or recognisably: with a PSNR of 25 dB, which no two
images of this site have.
"""

import argparse
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from benchmarks.measurement import Measurement, make_parser, say
from knnper.client.runtime import TrainingRequest
from knnper.client.site import SiteNode
from knnper.client.site_runtime import SiteRuntime
from knnper.errors import RefusedError
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment, to_json
from knnper.simulation.catalogue import experiment_catalogue, over_sites
from knnper.simulation.partition.export import export_shares
from knnper.simulation.workbench import open_workbench
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.training import mini_batches
from knnper.transport.messages import Job

CLIENT = "0000"
RECOGNISABLE_DB = 25.0
NUM_LABELS, NUM_PIXELS = 10, 64
# The tutorial's experiment, as an honest server sends it.
HONEST: Mapping[str, Any] = {"batch_size": 8, "learning_rate": 0.05}
SOFTMAX: Mapping[str, Any] = {"name": "softmax_regression"}
MLP: Mapping[str, Any] = {"name": "mlp", "hidden_sizes": [128, 64]}
# One step on all data of the site: crafted weights can exploit that sum.
ONE_STEP: Mapping[str, Any] = {"batch_size": 256, "local_steps": 1}


@dataclass(frozen=True)
class Extraction:
    """The result of an attack on a site at one setting."""

    setting: str
    attack: str
    extracted: int  # images, labels or answers
    total: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A site, and the images to extract."""

    folder: Path  # of the site's data
    public: Tensor  # similar images of the server, as rows in [0, 1]

    def opened(self, settings: Experiment, limits: str = "") -> SiteRuntime:
        """Start the client for a run; ``limits`` as in client.yaml, without braces."""
        file = self.folder / "client.yaml"
        file.write_text(
            f"name: '{CLIENT}'\nserver: 127.0.0.1:1\ninsecure: true\n"
            f"data: {{name: npz, path: shares/{CLIENT}.npz}}\n"
            f"limits: {{{limits}}}\n"
        )
        (self.folder / "state/answers.jsonl").unlink(missing_ok=True)
        context = Context(1, 1, {"config": str(file)}, RecordDict(), {})
        return SiteNode().open(context, Job([CLIENT], 1, [0], to_json(settings)))


def experiment_with(
    model: Mapping[str, Any], training: Mapping[str, Any]
) -> Experiment:
    """Return the tutorial's experiment with another model and training."""
    document = {
        "name": "hospitals",
        "data": {"name": "digits"},
        "partition": {
            "name": "dirichlet",
            "num_clients": 4,
            "alpha": 0.3,
            "unseen_fraction": 0.25,
        },
        "model": dict(model),
        "training": {"num_rounds": 5, **training},
        "method": {"name": "fedavg"},
    }
    return load_experiment(document, experiment_catalogue())


@dataclass
class ExtractedImages:
    """The images of a site, and the positions of those extracted so far."""

    images: Tensor  # of the site, as rows in [0, 1], float64 (n, pixels)
    exact: set[int]
    recognised: set[int]

    def add(self, candidates: Tensor) -> None:
        """Record the images that the rows of ``candidates``, in [0, 1], approximate."""
        candidates = candidates[torch.isfinite(candidates).all(dim=1)].clamp(0, 1)
        if not len(candidates):
            return
        errors = ((candidates[:, None] - self.images[None]) ** 2).mean(dim=2)
        near = errors.min(dim=0).values < 10 ** (-RECOGNISABLE_DB / 10)
        rounded = (255 * candidates).round()[:, None] == (255 * self.images).round()
        self.recognised |= _places(near)
        self.exact |= _places(rounded.all(dim=2).any(dim=0))


def _places(chosen: Tensor) -> set[int]:
    return set(torch.nonzero(chosen).flatten().tolist())


def no_images_of(worker: SiteRuntime) -> ExtractedImages:
    """Return the images of a site before the attack, none of them extracted."""
    images = worker.source.data(CLIENT).train.images
    return ExtractedImages(images.reshape(len(images), -1).double() / 255, set(), set())


def gained(worker: SiteRuntime, weights: Tensor, server_round: int) -> Tensor:
    """Return the decrease of ``weights`` by training, float64."""
    update = worker.train(
        TrainingRequest(CLIENT, ModelPayload(weights), server_round, 0, [0])
    )
    change: Tensor = weights.double() - update.weights.double()
    return change


def softmax_parts(change: Tensor) -> tuple[Tensor, Tensor]:
    """Split a softmax regression into rows (labels, pixels) and biases."""
    stop = NUM_LABELS * NUM_PIXELS
    return change[:stop].reshape(NUM_LABELS, NUM_PIXELS), change[stop:]


def pixels(worker: SiteRuntime, inputs: Tensor) -> Tensor:
    """Undo the normalisation of the model's inputs, to [0, 1]."""
    spec = worker.spec
    return inputs * spec.std[0] + spec.mean[0]


def honest_weights(
    target: Target, size: int, steps: int, rounds: int
) -> ExtractedImages:
    """Attack softmax regression with honest weights, like a curious server.

    A row of the update divided by its bias, and the difference of two rows divided by
    that of their biases, are means of images; an image alone with its label is such a
    mean.
    """
    training = {
        **HONEST,
        "batch_size": size,
        "local_steps": steps,
        "num_rounds": rounds,
    }
    settings = experiment_over_sites(SOFTMAX, training)
    worker = target.opened(settings, "min_examples: 1")
    recovered = no_images_of(worker)
    weights = worker.method.init([CLIENT], worker.key).weights
    pairs = torch.combinations(torch.arange(NUM_LABELS)).T
    for server_round in range(1, rounds + 1):
        change = gained(worker, weights, server_round)
        rows, biases = softmax_parts(change)
        of_rows = rows / biases[:, None]
        of_pairs = (rows[pairs[0]] - rows[pairs[1]]) / (
            biases[pairs[0]] - biases[pairs[1]]
        )[:, None]
        recovered.add(pixels(worker, torch.cat([of_rows, of_pairs])))
        weights = (weights.double() - change).float()
    return recovered


def trap_in_mlp(
    worker: SiteRuntime, target: Target, share: float, rounds: int
) -> ExtractedImages:
    """Attack an mlp with a first layer that divides the images by one value.

    Fowl et al., "Robbing the Fed", ICLR 2022: neuron j is active if u·x > q_j, and all
    neurons have the same gradient, so that neighbours differ by the image between them.
    The server estimates the quantiles q_j on its own images. The neurons cover a
    ``share`` of the images, those with the largest u·x; u changes in each round.
    """
    recovered = no_images_of(worker)
    model: Any = worker.limits.experiment.model.settings
    widths = model.hidden_sizes
    spec = worker.spec
    generator = torch.Generator().manual_seed(0)
    public = (target.public - spec.mean[0]) / spec.std[0]
    places = (torch.arange(widths[0], dtype=torch.float64) + 0.5) / widths[0]
    signs = torch.linspace(-1, 1, NUM_LABELS, dtype=torch.float64) + 0.037
    for server_round in range(1, rounds + 1):
        direction = torch.randn(NUM_PIXELS, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        limits = torch.quantile(public @ direction, 1 - share * (1 - places))
        second = torch.zeros(widths[1], widths[0], dtype=torch.float64)
        second[0] = 1
        head = torch.zeros(NUM_LABELS, widths[1], dtype=torch.float64)
        head[:, 0] = 0.01 * signs
        parts = [direction.repeat(widths[0], 1), -limits, second]
        parts += [torch.zeros(widths[1]), head, torch.zeros(NUM_LABELS)]
        weights = torch.cat([part.double().flatten() for part in parts]).float()
        change = gained(worker, weights, server_round)
        rows = change[: widths[0] * NUM_PIXELS].reshape(widths[0], NUM_PIXELS)
        between = torch.cat([rows[:-1] - rows[1:], rows[-1:]])
        # The first pixel of a digit is black, which reveals the scale of a row.
        factors = between[:, 0] / (-spec.mean[0] / spec.std[0])
        recovered.add(pixels(worker, between / factors[:, None]))
    return recovered


def trap_in_softmax(
    worker: SiteRuntime, target: Target, rounds: int
) -> ExtractedImages:
    """Attack softmax regression with weights that assign slices of images to labels.

    If p is 0 or 1, row c of an update is the sum of the images in slice c minus that of
    the images with label c. The first update has one slice and gives the sums by label;
    later, a slice with one image reveals it.
    """
    recovered = no_images_of(worker)
    spec = worker.spec
    generator = torch.Generator().manual_seed(0)
    public = (target.public - spec.mean[0]) / spec.std[0]
    biases = torch.zeros(NUM_LABELS, dtype=torch.float64)
    biases[0] = 1e4
    rows = torch.zeros(NUM_LABELS, NUM_PIXELS, dtype=torch.float64)
    nothing = torch.cat([rows.flatten(), biases]).float()
    # Every update of one step uses the same images in all rounds.
    by_label, counts = softmax_parts(gained(worker, nothing, 1))
    recovered.add(pixels(worker, by_label[1:] / counts[1:, None]))
    for server_round in range(2, rounds + 1):
        direction = torch.randn(NUM_PIXELS, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        # Slices at the sparse end, with few images each.
        ends = 1 - 0.7 * torch.arange(NUM_LABELS - 1, 0, -1) / 239
        cuts = torch.quantile(public @ direction, ends.double())
        steps = torch.arange(NUM_LABELS, dtype=torch.float64)
        # The upper envelope of these lines changes at each cut.
        rows = 1e4 * steps[:, None] * direction
        biases = torch.cat([torch.zeros(1), -1e4 * cuts.cumsum(0)])
        weights = torch.cat([rows.flatten(), biases]).float()
        of_slices, sizes = softmax_parts(gained(worker, weights, server_round))
        slices, sizes = of_slices - by_label, sizes - counts
        recovered.add(pixels(worker, slices[1:] / sizes[1:, None]))
    return recovered


def label_counts(worker: SiteRuntime, *, honest: bool) -> tuple[Tensor, Tensor]:
    """Return the true label counts of the training data, and those from one update.

    Each step changes the bias of label c by its share of the batch minus the mean of
    p_c. For honest weights, the attack assumes 1 / (number of labels) for this mean. A
    model that predicts label 0 by a bias alone makes it 0 for the other labels.
    """
    training = worker.limits.experiment.training
    weights = worker.method.init([CLIENT], worker.key).weights
    if not honest:
        weights = torch.zeros_like(weights)
        weights[-NUM_LABELS] = 1e4
    change = gained(worker, weights, 1)[-NUM_LABELS:]
    labels = worker.source.data(CLIENT).train.labels
    rng = worker.key.child("client_update", 1, CLIENT)
    batches = mini_batches(len(labels), training.batch_size, rng)
    used = torch.cat([next(batches) for _ in range(len(labels) // training.batch_size)])
    prior = len(used) / NUM_LABELS if honest else 0
    estimated = (
        (prior - change * training.batch_size / training.learning_rate).round().long()
    )
    if not honest:
        estimated[0] = len(used) - estimated[1:].sum()
    return torch.bincount(labels[used], minlength=NUM_LABELS), estimated


def label_counts_of_validation(worker: SiteRuntime) -> tuple[Tensor, Tensor, int]:
    """Return the true label counts of the validation split, those from answers, and n.

    A model with the constant logit -d_c for label c has the loss n log Z + Σ n_c d_c.
    With d_c = 20 (n + 1)^-k, four counts are the digits of one number.
    """
    labels = worker.source.data(CLIENT).validation.labels
    radix, at_once, answers = len(labels) + 1, 4, 0
    estimated = torch.zeros(NUM_LABELS, dtype=torch.int64)
    for first in range(0, NUM_LABELS - 1, at_once):
        some = torch.arange(first, min(first + at_once, NUM_LABELS - 1))
        logits = torch.zeros(NUM_LABELS, dtype=torch.float64)
        logits[some] = -20 * float(radix) ** -torch.arange(len(some)).double()
        weights = torch.zeros(NUM_LABELS * (NUM_PIXELS + 1))
        weights[-NUM_LABELS:] = logits.float()
        answer = worker.validate([CLIENT], ModelPayload(weights)).reference
        excess = answer.log_loss_sum - len(labels) * float(logits.logsumexp(0))
        number = round(excess / 20 * radix ** (len(some) - 1))
        for label in reversed(some.tolist()):
            number, estimated[label] = divmod(number, radix)
        answers += 1
    estimated[-1] = len(labels) - estimated.sum()
    return torch.bincount(labels, minlength=NUM_LABELS), estimated, answers


def presence(worker: SiteRuntime, images: Tensor) -> list[bool]:
    """Test for each image, (n, pixels) in [0, 1], whether it is in the validation data.

    An mlp computes the sum of |x - t| for an image t, and is confident if it is 0.
    """
    spec = worker.spec
    model: Any = worker.limits.experiment.model.settings
    first, second = model.hidden_sizes
    answers = []
    for image in (images - spec.mean[0]) / spec.std[0]:
        both = torch.cat([torch.eye(NUM_PIXELS), -torch.eye(NUM_PIXELS)]).double()
        near = torch.zeros(second, first, dtype=torch.float64)
        near[0] = -100
        second_layer = torch.zeros(second)
        second_layer[0] = 1
        head = torch.zeros(NUM_LABELS, second, dtype=torch.float64)
        head[0, 0] = 100
        parts = [both, -both @ image, near, second_layer, head, torch.zeros(NUM_LABELS)]
        weights = torch.cat([part.double().flatten() for part in parts]).float()
        answer = worker.validate([CLIENT], ModelPayload(weights)).reference
        answers.append(answer.bin_counts[-1] > 0)
    return answers


def with_honest_weights(target: Target) -> Iterator[Extraction]:
    """Yield the results of a server that sends honest weights."""
    attack = "one image an update"
    recovered = honest_weights(target, 1, 1, rounds=400)
    yield _of_images("min_examples: 1", attack, recovered, 400)
    settings = experiment_over_sites(SOFTMAX, {"batch_size": 1, "local_steps": 1})
    try:
        target.opened(settings).train(TrainingRequest(CLIENT, None, 1, 0, [0]))
    except RefusedError as error:
        refused = {"refused": str(error)}
        total = len(recovered.images)
        yield Extraction("the default", attack, 0, total, refused)
    for size, steps in (
        (2, 1),
        (4, 1),
        (8, 1),
        (1, 16),
        (16, 1),
        (1, 32),
        (8, 4),
        (32, 1),
    ):
        recovered = honest_weights(target, size, steps, rounds=60)
        attack = f"honest weights, {steps} step(s) of {size} image(s)"
        yield _of_images(f"min_examples: {size * steps}", attack, recovered, 60)


def with_trap_weights(target: Target) -> Iterator[Extraction]:
    """Yield the images of a server that sends crafted weights."""
    wide = {"name": "mlp", "hidden_sizes": [2048, 8]}
    worker = target.opened(
        experiment_over_sites(wide, {**ONE_STEP, "learning_rate": 1e4})
    )
    recovered = trap_in_mlp(worker, target, 1.0, 1)
    yield _of_images("the default", "trap in an mlp of the server's", recovered, 1)
    for rounds in (1, 5, 50):
        worker = target.opened(experiment_over_sites(MLP, HONEST))
        recovered = trap_in_mlp(worker, target, 0.3, rounds)
        yield _of_images("experiment pinned", "trap in an mlp", recovered, rounds)
    for rounds in (1, 10, 50):
        settings = experiment_over_sites(SOFTMAX, {**ONE_STEP, "learning_rate": 1e6})
        recovered = trap_in_softmax(target.opened(settings), target, rounds)
        attack = "trap in softmax regression"
        yield _of_images("models: [softmax_regression]", attack, recovered, rounds)


def of_labels_and_presence(target: Target) -> Iterator[Extraction]:
    """Yield the labels and answers from updates and metrics."""
    cnn = {"name": "tiny_cnn", "embedding_dim": 32}
    for honest, weights in ((True, "honest"), (False, "trap")):
        worker = target.opened(experiment_over_sites(cnn, HONEST))
        true, estimated = label_counts(worker, honest=honest)
        attack = f"labels by the bias of one update, {weights} weights"
        yield _of_labels("experiment pinned", attack, true, estimated, 1)
    worker = target.opened(experiment_over_sites(SOFTMAX, HONEST))
    attack = "labels of the validation split by losses"
    true, estimated, answers = label_counts_of_validation(worker)
    yield _of_labels("share_metrics: true", attack, true, estimated, answers)
    worker = target.opened(experiment_over_sites(MLP, HONEST))
    split = worker.source.data(CLIENT).validation.images
    present = split[:20].reshape(20, -1).double() / 255
    is_present = presence(worker, torch.cat([present, target.public[:20]]))
    right = sum(is_present[:20]) + sum(not answer for answer in is_present[20:])
    yield Extraction("share_metrics: true", "is it there?", right, 40, {"answers": 40})


def _of_labels(
    setting: str, attack: str, true: Tensor, estimated: Tensor, answers: int
) -> Extraction:
    details = {"true": true.tolist(), "said": estimated.tolist(), "answers": answers}
    num_right = int((true == estimated).sum())
    return Extraction(setting, attack, num_right, len(true), details)


def experiment_over_sites(
    model: Mapping[str, Any], training: Mapping[str, Any]
) -> Experiment:
    """Return the experiment of `experiment_with` with data that stays at the sites."""
    return over_sites(experiment_with(model, training))


def _of_images(
    setting: str, attack: str, recovered: ExtractedImages, rounds: int
) -> Extraction:
    details = {"recognisable": len(recovered.recognised), "updates": rounds}
    total = len(recovered.images)
    return Extraction(setting, attack, len(recovered.exact), total, details)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    return make_parser(__doc__, repetitions=1)


def main() -> None:
    """Attack and print."""
    parser().parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = open_workbench(experiment_with(SOFTMAX, HONEST))
        data = bench.clients.dataset
        export_shares(data, bench.partition, Path(folder) / "shares")
        test = torch.from_numpy(np.array(data.test.images))
        target = Target(Path(folder), test.reshape(len(test), -1).double() / 255)
        attacks = (with_honest_weights, with_trap_weights, of_labels_and_presence)
        for result in chain(*(attack(target) for attack in attacks)):
            say(f"site_leakage: {result.setting}: {result.attack}")
            record = {
                "setting": result.setting,
                "attack": result.attack,
                **result.details,
            }
            line = Measurement(
                "site_leakage",
                [result.extracted],
                [result.total],
                "number of all images, labels or answers",
                record,
            )
            print(line.as_json(), flush=True)


if __name__ == "__main__":
    main()
