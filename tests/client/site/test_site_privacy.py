"""Clipping, noise and a budget of ε that a site applies to its own updates."""

import dataclasses
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from knnper.client import site_privacy
from knnper.client.privacy_ledger import LEDGER, read_updates
from knnper.client.runtime import TrainingRequest
from knnper.client.settings import SitePrivacySettings, read_client
from knnper.client.site_privacy import applied_privacy, only_weights
from knnper.client.site_runtime import MetricsPolicy, SiteRuntime
from knnper.errors import RefusedError, RunError
from knnper.experiment import Experiment, TrainingSettings
from knnper.privacy import Release, epsilon_of
from knnper.privacy_settings import PrivacySettings
from knnper.records import tensors_of
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.mean_update import differences
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.strategies.fedavg import FedAvg
from tests.apps.site_grid import experiment, make_sites
from tests.client.site.test_site import (
    CLIENT,
    OF_FEDAVG,
    HostileServer,
    append,
    asked,
    limit,
    not_trained,
    refused,
    state,
)
from tests.strategies.tiny import linear_task

SMALL = {
    "model": "{name: softmax_regression}",
    "personalization": "{}",
    "method": "{name: fedavg}",
}
SIGMA = 8.0


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the sites' data once."""
    folder = tmp_path_factory.mktemp("sites")
    make_sites(folder, experiment())
    return folder


@pytest.fixture
def file(tmp_path: Path, sites: Path) -> Path:
    shutil.copytree(sites, tmp_path / "sites")
    return tmp_path / "sites" / f"{CLIENT}.yaml"


def protect(file: Path, *lines: str) -> None:
    """Give a site limits of privacy; each line is ``key: value``."""
    limit(file, f"privacy: {{{', '.join(lines)}}}")


def rounds_of(count: int) -> str:
    """Return a budget into which ``count`` updates with σ = 8 just fit."""
    epsilon = epsilon_of([Release(SIGMA / 2, count=count)], 1e-5)
    return f"epsilon_run: {epsilon + 1e-6}"


NOISY = f"clip_norm: 1.0, noise_multiplier: {SIGMA}"


def moved(server: HostileServer, settings: Experiment) -> torch.Tensor:
    """Return how far the site's update moved the model, (d,) float64."""
    payload, update = server.train(settings)
    difference: torch.Tensor = update.weights - payload.weights
    return difference.double()


def test_null_sends_the_update_bit_for_bit(file: Path) -> None:
    _, plain = HostileServer(file).train(asked(**SMALL))
    limit(file, "privacy: null")
    _, update = HostileServer(file, run=2).train(asked(**SMALL))
    assert torch.equal(plain.weights, update.weights)
    assert (plain.num_examples, plain.train_loss) == (
        update.num_examples,
        update.train_loss,
    )
    assert not (state(file) / LEDGER).exists()


def test_update_is_clipped_to_the_norm(file: Path) -> None:
    plain = moved(HostileServer(file), asked(**SMALL))
    short = float(plain.norm()) / 3
    protect(file, f"clip_norm: {short}, noise_multiplier: 0")
    clipped = moved(HostileServer(file, run=2), asked(**SMALL))
    torch.testing.assert_close(clipped, plain / 3, rtol=1e-4, atol=1e-6)


def test_update_within_the_norm_stays(file: Path) -> None:
    plain = moved(HostileServer(file), asked(**SMALL))
    norm = 3 * float(plain.norm())
    protect(file, f"clip_norm: {norm}, noise_multiplier: 0")
    kept = moved(HostileServer(file, run=2), asked(**SMALL))
    torch.testing.assert_close(kept, plain, rtol=1e-4, atol=1e-6)


def test_noise_is_gaussian_with_the_deviation_that_is_accounted(file: Path) -> None:
    protect(file, "clip_norm: 0.5", "noise_multiplier: 20")
    numbers = moved(HostileServer(file), asked()) / (20 * 0.5)
    count = len(numbers)
    assert count > 1000
    # The signal has the norm 0.05 in these units. Bounds of 6 deviations.
    assert abs(float(numbers.mean())) < 6 / math.sqrt(count) + 0.05
    assert abs(float(numbers.std()) - 1) < 6 / math.sqrt(2 * count) + 0.01
    for quantile in (0.1, 0.5, 0.9):
        fraction = (numbers < norm.ppf(quantile)).double().mean()
        assert abs(float(fraction) - quantile) < 6 * 0.5 / math.sqrt(count) + 0.01
    (entry,) = read_updates(state(file))
    assert entry.noise_multiplier == 20


def test_rounding_to_large_weights_does_not_lengthen_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server can send weights so large that float32 has a step of 2^-6 there.

    Clipped numbers just above half a step, rounded before the noise, would have a norm
    of 2 S, and ε would be that of half the noise.
    """
    method = FedAvg(linear_task(TrainingSettings(), 10_000), FedAvg.settings_type())
    step, clip_norm = 2.0**-6, 1.12
    payload = ModelPayload(torch.full((20_000,), 2.0**17))
    update = ModelUpdate(payload.weights + step, 10, 0.5)

    def dither(*_: Any) -> Any:
        """Return noise with which rounding has no bias, so that a mean shows it."""
        generator = np.random.default_rng(0)
        return SimpleNamespace(
            normal=lambda _mean, _deviation, size: generator.uniform(
                -step / 2, step / 2, size
            )
        )

    monkeypatch.setattr(site_privacy, "system_noise", dither)
    privacy = SitePrivacySettings(clip_norm=clip_norm, noise_multiplier=SIGMA)
    protected = site_privacy.ProtectedUpdates(method.task, method, privacy)
    sent = protected.process(payload, update, RandomKey(0))
    mean = float((sent.weights - payload.weights).double().mean())
    assert mean * math.sqrt(20_000) == pytest.approx(clip_norm, rel=0.05)


def test_noise_does_not_come_from_the_seed_of_the_experiment(file: Path) -> None:
    protect(file, NOISY)
    first, second = (moved(HostileServer(file, run), asked(**SMALL)) for run in (1, 2))
    # The trainings are equal, so the difference is that of two independent noises.
    difference = (first - second) / (math.sqrt(2) * SIGMA)
    assert abs(float(difference.std()) - 1) < 6 / math.sqrt(2 * len(difference))


def test_protected_updates_are_compressed(file: Path) -> None:
    protect(file, NOISY)
    settings = asked(**SMALL, **{"training.compression": "{name: quantize}"})
    server = HostileServer(file)
    payload, update = server.train(settings)
    assert type(update).__name__ == "CompressedUpdate"
    runtime = server.worker(settings)
    assert runtime.method.decoded is not None
    decoded = runtime.method.decoded(payload, update)
    distance = float((decoded.weights - payload.weights).norm())
    expected = SIGMA * math.sqrt(payload.weights.numel())
    assert 0.7 * expected < distance < 1.3 * expected


def test_site_stops_at_its_budget(file: Path) -> None:
    protect(file, NOISY, rounds_of(3))
    settings = asked(**SMALL)  # of two rounds
    server = HostileServer(file)
    for server_round in (1, 2, 3):
        server.train(settings, server_round)
    words = r"epsilon of the run .* expected .* at delta 1e-05 \(limits.privacy\)"
    not_trained(server, settings, words)
    not_trained(HostileServer(file, run=2), settings, words)
    assert len(read_updates(state(file))) == 3


def test_another_experiment_meets_the_budget_of_the_year(file: Path) -> None:
    protect(file, NOISY, rounds_of(3), rounds_of(4).replace("run", "year"))
    for server_round in (1, 2, 3):
        HostileServer(file).train(asked(**SMALL), server_round)
    other = asked(**SMALL, **{"run.seed": 5})
    HostileServer(file, run=2).train(other)
    not_trained(HostileServer(file, run=2), other, "epsilon of the year")


def test_run_beyond_the_budget_does_not_begin(file: Path) -> None:
    protect(file, NOISY, rounds_of(3))
    four = asked(**SMALL, **{"training.num_rounds": 4})
    problem = HostileServer(file, run=7).introduced(four).problem
    assert "with this many more updates: 4" in problem
    half = asked(**SMALL, **{"training.num_rounds": 6, "training.participation": 0.5})
    assert HostileServer(file, run=8).introduced(half).problem == ""
    HostileServer(file, run=8).train(half, 1)
    assert HostileServer(file, run=9).introduced(half).problem == "", "resumed"
    for server_round in (2, 3):
        HostileServer(file, run=8).train(half, server_round)
    problem = HostileServer(file, run=10).introduced(half).problem
    assert "with this many more updates: 3" in problem, "from the start"


def test_update_is_in_the_ledger_before_it_leaves(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protect(file, NOISY, rounds_of(1))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MetricsPolicy, "filter_update", killed)
        with pytest.raises(KeyboardInterrupt):
            HostileServer(file).train(asked(**SMALL))
    not_trained(HostileServer(file), asked(**SMALL), "limits.privacy")


def test_budget_that_another_process_spent_meanwhile_stops_the_update(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protect(file, NOISY, rounds_of(1))
    server = HostileServer(file)
    train = SiteRuntime.__bases__[0].train  # type: ignore[attr-defined]

    def slowly(runtime: SiteRuntime, request: TrainingRequest) -> Any:
        assert runtime.limits.privacy_budget is not None
        assert runtime.limits.privacy_budget.spend(1) == []
        return train(runtime, request)

    monkeypatch.setattr(SiteRuntime.__bases__[0], "train", slowly)
    not_trained(server, asked(**SMALL), "limits.privacy")


def test_damaged_ledger_stops_the_site(file: Path) -> None:
    protect(file, NOISY, rounds_of(3))
    HostileServer(file).train(asked(**SMALL))
    (state(file) / LEDGER).unlink()
    with pytest.raises(RunError, match="cannot be trusted"):
        HostileServer(file).train(asked(**SMALL))


SITE = SitePrivacySettings(clip_norm=2.0, noise_multiplier=8.0)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (None, (2.0, 8.0)),
        (PrivacySettings(3.0, 0.1), (2.0, 8.0)),
        (PrivacySettings(0.5, 50.0), (0.5, 8.0)),  # the server's noise
        (PrivacySettings(0.5, adaptive=True), (2.0, 8.0)),
        # 90 * 4 / sqrt(9) = 120, and 60 times the clip norm of the site.
        (PrivacySettings(4.0, 90.0, noise_shares=9),
         (2.0, 60.0)),
        (PrivacySettings(4.0, 9.0, noise_shares=9),
         (2.0, 8.0)),
    ],
)  # fmt: skip
def test_smaller_norm_and_larger_noise_apply(
    run: PrivacySettings | None, expected: tuple[float, float]
) -> None:
    applied = applied_privacy(SITE, run)
    assert (applied.clip_norm, applied.noise_multiplier) == expected
    assert applied_privacy(SitePrivacySettings(), run) == SitePrivacySettings()


def test_run_that_asks_for_more_noise_gets_it_once(file: Path) -> None:
    protect(file, "clip_norm: 1.0, noise_multiplier: 0.5")
    privacy = "{clip_norm: 2, noise_multiplier: 20, noise_shares: 4}"
    settings = asked(**SMALL, privacy=privacy)
    numbers = moved(HostileServer(file), settings) / 20  # 20 * 2 / sqrt(4)
    assert abs(float(numbers.std()) - 1) < 6 / math.sqrt(2 * len(numbers)) + 0.01
    (entry,) = read_updates(state(file))
    assert entry.noise_multiplier == 20


def test_share_of_the_noise_comes_from_the_operating_system(file: Path) -> None:
    privacy = "{clip_norm: 2, noise_multiplier: 20, noise_shares: 4}"
    settings = asked(**SMALL, privacy=privacy)
    first = moved(HostileServer(file), settings)
    second = moved(HostileServer(file, run=2), settings)
    difference = (first - second) / 20  # 20 * 2 / sqrt(4)
    assert abs(float(difference.std()) - math.sqrt(2)) < 0.1


def test_clipping_comes_before_all_noise(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = moved(HostileServer(file), asked(**SMALL))
    short = float(plain.norm()) / 2
    protect(file, f"clip_norm: {short}, noise_multiplier: 0.5")
    privacy = "{clip_norm: 9, noise_multiplier: 20, noise_shares: 4}"
    silent = SimpleNamespace(normal=lambda _mean, _deviation, size: np.zeros(size))
    monkeypatch.setattr(site_privacy, "system_noise", lambda _: silent)
    settings = asked(**SMALL, privacy=privacy)
    clipped = moved(HostileServer(file, run=2), settings)
    torch.testing.assert_close(clipped, plain / 2, rtol=1e-4, atol=1e-6)


REFUSED = {
    "afl", "agnostic", "clustered_fl", "fedas", "fedattn", "fedbasis", "fedpac",
    "fedproto", "hypcluster", "pfedfda", "qfedavg", "scaffold",
}  # fmt: skip


def test_methods_that_send_more_than_weights_are_refused(file: Path) -> None:
    assert {name for name, method in METHODS.items() if not only_weights(method)} == (
        REFUSED
    )
    protect(file, NOISY)
    settings = asked(**{**OF_FEDAVG, "method": "{name: fedattn}"})
    refused(HostileServer(file), settings, "updates of fedattn hold more than trained")
    append(file, "train: false")
    assert HostileServer(file, run=2).introduced(settings).problem == ""


def constant(_mean: float, _deviation: float, count: int) -> NDArray[np.float64]:
    """Return noise of 1000 in each number."""
    return np.full(count, 1000.0)


# FedBN is refused with its models, which have BatchNorm; Local sends nothing of use.
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", sorted(METHODS.keys() - REFUSED - {"fedbn", "local"})
)
def test_every_number_of_an_update_has_noise(
    file: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        site_privacy, "system_noise", lambda _: SimpleNamespace(normal=constant)
    )
    protect(file, NOISY)
    settings = asked(
        method=f"{{name: {method}}}",
        personalization="{}",
        model="{name: tiny_cnn, norm: none}",
    )
    server = HostileServer(file)
    payload, update = server.train(settings)
    runtime = server.worker(settings)
    moves = differences(runtime.method, payload, update)
    torch.testing.assert_close(
        moves, torch.full_like(moves, 1000.0), rtol=1e-4, atol=1.1
    )
    # Nothing but tensors, the number of examples and the loss is sent.
    other_names = {field.name for field in dataclasses.fields(update)} - {
        "num_examples",
        "train_loss",
    }
    first_names = {path.split("/")[0] for path in tensors_of(update)}
    assert first_names == other_names


def test_model_with_running_statistics_is_refused(file: Path) -> None:
    protect(file, NOISY)
    settings = asked(**OF_FEDAVG, model="{name: tiny_cnn, norm: batch}")
    server = HostileServer(file)
    refused(server, settings, "running statistics")
    payload = server.payload(settings)
    results = server.worker(settings).personalize([CLIENT], payload, payload, [0])
    assert not results.failures, "it still gets the model"


def test_nothing_but_the_update_leaves_by_default(file: Path) -> None:
    protect(file, NOISY, "weight: 50")
    server, settings = HostileServer(file), asked(**SMALL)
    introduction = server.introduced(settings)
    sizes = (
        introduction.num_train,
        introduction.num_validation,
        introduction.num_test,
    )
    assert sizes == (50, 0, 0)
    payload, update = server.train(settings)
    assert update.num_examples == 50
    assert math.isnan(update.train_loss)
    validation = server.worker(settings).validate([CLIENT], payload)
    assert validation.reference.num_examples == 0
    results = server.worker(settings).personalize([CLIENT], payload, payload, [1])
    assert (results.results, results.withheld) == ((), (CLIENT,))


def test_what_is_shared_leaves(file: Path) -> None:
    plain = HostileServer(file).introduced(asked(**SMALL))
    protect(file, NOISY, "share: [metrics, counts]")
    server = HostileServer(file, run=2)
    assert server.introduced(asked(**SMALL)) == plain
    payload, update = server.train(asked(**SMALL))
    assert update.num_examples == plain.num_train
    assert update.train_loss > 0
    validation = server.worker(asked(**SMALL)).validate([CLIENT], payload)
    assert validation.reference.num_examples == plain.num_validation


def test_refusals_hide_counts(file: Path) -> None:
    limit(file, "min_examples: 10000", "privacy: {clip_norm: 1, noise_multiplier: 0}")
    answer = HostileServer(file).introduced(asked(**SMALL))
    assert (answer.train, answer.num_train) == (False, 1)
    assert answer.remark.startswith("found fewer examples or steps")
    not_trained(HostileServer(file), asked(**SMALL), "found fewer examples")


def test_label_shares_are_refused_unless_shared(file: Path) -> None:
    fedpac = asked(method="{name: fedpac}", personalization="{}")
    protect(file, "share: [metrics, counts]")
    text = file.read_text()
    refused(HostileServer(file), fedpac, "frequency of each label")
    file.write_text(text.replace("counts", "counts, label_shares"))
    assert HostileServer(file, run=2).introduced(fedpac).problem == ""


def test_metrics_are_withheld_by_either_setting(file: Path) -> None:
    text = file.read_text()
    for share, top_level, expected in (
        ("metrics, counts", "true", True),
        ("metrics, counts", "false", False),
        ("counts", "true", False),
    ):
        file.write_text(f"{text}share_metrics: {top_level}\n")
        protect(file, f"share: [{share}]")
        assert read_client(file).share_metrics is expected


def test_refusal_is_one_of_the_limits(file: Path) -> None:
    protect(file, NOISY, rounds_of(1))
    HostileServer(file).train(asked(**SMALL))
    with pytest.raises(RefusedError) as raised:
        HostileServer(file).train(asked(**SMALL))
    policy = MetricsPolicy(read_client(file).share_metrics)
    assert "(limits.privacy)" in policy.explain(raised.value), "with its reason"
