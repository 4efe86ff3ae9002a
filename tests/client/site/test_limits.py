"""What a site's own limits refuse, whatever a server sends."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knnper.client import limits
from knnper.client.limits import (
    ANSWERS,
    MOST,
    REFUSALS,
    Answer,
    Answers,
    last_refusal,
    note_refusal,
)
from knnper.client.runtime import ClientRuntime
from knnper.client.settings import read_client
from knnper.errors import RefusedError, RunError
from knnper.experiment import results_identity
from knnper.files import is_private
from knnper.strategies.catalogue import METHODS
from tests.apps.site_grid import experiment, make_sites
from tests.client.site.hostile_server import (
    CLIENT,
    HostileServer,
    asked,
    image_of,
    one_by_one,
)

OF_FEDAVG = {"method": "{name: fedavg}", "personalization": "{}"}
OTHER_RATE = {"training.learning_rate": 0.5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_sites(tmp_path, experiment())[CLIENT]


def limit(file: Path, *lines: str) -> None:
    """Give a site limits; each line is ``key: value``."""
    file.write_text(f"{file.read_text()}limits: {{{', '.join(lines)}}}\n")


def state(file: Path) -> Path:
    return file.parent / f"state-{CLIENT}"


def refusals(file: Path) -> list[dict[str, str]]:
    text = (state(file) / REFUSALS).read_text()
    return [json.loads(line) for line in text.splitlines()]


def not_trained(server: HostileServer, settings: Any, words: str) -> None:
    """Refused to whoever does not ask before it sends."""
    with pytest.raises(RefusedError, match=words):
        server.train(settings)


def refused(server: HostileServer, settings: Any, *words: str) -> None:
    """Refused as it is introduced, too."""
    problem = server.introduced(settings).problem
    assert all(one in problem for one in words), problem
    not_trained(server, settings, words[0])


def test_the_reconstruction_attack_is_refused_by_default(file: Path) -> None:
    for run in (1, 2, 3):
        refused(HostileServer(file, run), one_by_one(), "limits.min_examples")
    (noted,) = refusals(file)
    assert noted["about"] == "run"
    assert all(one in noted["reason"] for one in ("found 1 examples", "expected 32"))


def test_without_limits_it_gives_an_image_bit_for_bit(file: Path) -> None:
    limit(file, "min_examples: 1")
    server = HostileServer(file)
    sent, update = server.train(one_by_one())
    worker = server.worker(one_by_one())
    found = image_of(sent.weights, update.weights, worker)
    images = worker.runtime.source.data(CLIENT).train.images
    assert (images.reshape(len(images), -1) == found).all(dim=1).any()


def test_one_image_in_many_steps_or_too_few_steps_are_refused_too(file: Path) -> None:
    settings = one_by_one(**{"training.local_steps": 20})
    refused(HostileServer(file), settings, "found 20 examples")
    settings = one_by_one(**{"training.local_steps": 64})
    assert HostileServer(file, run=2).introduced(settings).problem == ""
    limit(file, "min_steps: 3")
    settings = one_by_one(**{"training.batch_size": 32, "training.local_steps": 2})
    refused(HostileServer(file, run=3), settings, "limits.min_steps")


def test_a_site_with_few_examples_gets_the_model_and_trains_none(file: Path) -> None:
    limit(file, "min_examples: 10000")
    server = HostileServer(file)
    said = server.introduced(asked())
    assert (said.problem, said.train) == ("", False)
    assert "limits.min_examples" in said.remark
    not_trained(server, asked(), "limits.min_examples")
    file.write_text(f"{file.read_text()}train: false\n")
    not_trained(server, asked(), "train: false")


def test_what_really_happened_is_looked_at(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings promise more than a client's data has when it is trained on."""
    whole = ClientRuntime.train

    def on_less(self: ClientRuntime, *arguments: Any) -> Any:
        data = self.source.data(CLIENT)
        few = dataclasses.replace(data, train=data.train.take(torch.arange(5)))
        source: Any = SimpleNamespace(data=lambda _: few)
        return whole(dataclasses.replace(self, source=source), *arguments)

    monkeypatch.setattr(ClientRuntime, "train", on_less)
    not_trained(HostileServer(file), asked(**OF_FEDAVG), "found 5 examples")


def test_weights_that_leave_one_label_alone_are_seen_through(file: Path) -> None:
    """Agnostic FL's server weighs the labels: here all but a rare one with nothing."""
    settings = asked(method="{name: agnostic, domain: label}", personalization="{}")
    server = HostileServer(file)
    worker = server.worker(settings)
    labels = worker.runtime.source.data(CLIENT).train.labels
    counts = torch.bincount(labels, minlength=10)
    rare = int(counts.where((counts > 0) & (counts < 32), 1000).argmin())
    assert 0 < counts[rare] < 32
    payload = server.payload(settings)
    factors = torch.full_like(payload.label_factors, 1e-9)
    factors[rare] = 1.0
    hostile = dataclasses.replace(payload, label_factors=factors)
    with pytest.raises(RefusedError, match=f"found {counts[rare]} examples"):
        worker.train(CLIENT, hostile, 1, 0, [0])
    worker.train(CLIENT, payload, 1, 0, [0])


def test_methods_and_models_are_told_together(file: Path) -> None:
    limit(file, "methods: [knn_per, ditto]", "models: []")
    words = "method fedavg, expected knn_per, ditto", "tiny_cnn, expected none"
    refused(HostileServer(file), asked(**OF_FEDAVG), *words)


def test_a_pinned_experiment_is_the_only_one(file: Path) -> None:
    wanted, other = asked(), asked(**OTHER_RATE)
    pinned = results_identity(wanted)
    limit(file, f"experiment: {pinned}")
    server = HostileServer(file)
    refused(server, other, "limits.experiment", pinned, results_identity(other))
    assert server.introduced(wanted).problem == ""
    server.train(wanted)


def test_a_run_stays_with_the_experiment_that_it_began_with(file: Path) -> None:
    server, other = HostileServer(file), asked(**OTHER_RATE)
    assert server.introduced(asked()).problem == ""
    not_trained(server, other, "with which this run began")
    HostileServer(file, run=2).train(other)


def test_training_rounds_are_counted_over_all_runs(file: Path) -> None:
    limit(file, "training_rounds: 3")
    for run, settings in enumerate((asked(), asked(), asked(**OF_FEDAVG)), 1):
        HostileServer(file, run).train(settings)
    words = r"3 of 3 in 30 days \(limits.training_ro"
    not_trained(HostileServer(file, run=4), asked(), words)


def test_a_round_counts_even_if_the_process_dies_in_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(file, "training_rounds: 1")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ClientRuntime, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            HostileServer(file).train(asked())
    not_trained(HostileServer(file), asked(), "limits.training_rounds")


@pytest.mark.parametrize(("days", "left"), [("30", 1), ("40", 0), ("null", 0)])
def test_what_was_long_ago_counts_no_more(file: Path, days: str, left: int) -> None:
    limit(file, "training_rounds: 1", f"days: {days}")
    answers = Answers(read_client(file))
    answers.note(Answer(datetime.now(UTC) - timedelta(days=31), 9, "e", "training"))
    assert answers.left("training", answers.read()) == left


def test_a_run_that_cannot_be_ended_does_not_begin(file: Path) -> None:
    limit(file, "training_rounds: 3", "validation_rounds: 4")
    two, four = asked(), asked(**{"training.num_rounds": 4})
    problem = HostileServer(file, run=7).introduced(four).problem
    assert "needs 4 more answers (training), after 0 of 3" in problem
    assert "needs 5 more answers (validation), after 0 of 4" in problem
    assert HostileServer(file).introduced(two).problem == ""
    for server_round in (1, 2):
        HostileServer(file).train(two, server_round)
    problem = HostileServer(file, run=2).introduced(two).problem
    assert "needs 2 more answers (training), after 2 of 3" in problem, "from the start"


def test_a_run_needs_what_is_missing_of_its_participation(file: Path) -> None:
    limit(file, "training_rounds: 2")
    half = {"training.participation": 0.5, "training.num_rounds": 4}
    settings = asked(**half, **{"run.validate_every": 0})
    assert HostileServer(file, run=3).introduced(settings).problem == ""
    HostileServer(file).train(asked())
    assert HostileServer(file, run=2).introduced(asked()).problem == "", "resumed"


def test_rounds_of_validation_are_limited(file: Path) -> None:
    limit(file, "validation_rounds: 2")
    server = HostileServer(file)
    worker, payload = server.worker(asked()), server.payload(asked())
    assert worker.validate([CLIENT], payload).num_examples > 0
    shown = worker.personalize([CLIENT], payload, payload, [2])
    assert len(shown.results) + len(shown.failures) == 1
    again = HostileServer(file, run=2).worker(asked())
    with pytest.raises(RefusedError, match=r"2 of 2 in 30 days \(limits.validation"):
        again.validate([CLIENT], payload)
    hidden = again.personalize([CLIENT], payload, payload, [2])
    assert (hidden.results, len(hidden.withheld) + len(hidden.failures)) == ((), 1)


def test_what_was_answered_must_be_known(file: Path) -> None:
    HostileServer(file).train(asked())
    (state(file) / ANSWERS).write_text('{"kind": "training"}\n')
    with pytest.raises(RunError, match=r"damaged.*remove the file"):
        HostileServer(file).train(asked())


def test_runs_do_not_fill_the_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_BEGUN_KEPT", 2)
    monkeypatch.setattr(limits, "_TIDIED_BEYOND_BYTES", 0)
    HostileServer(file, run=1).train(asked())
    for run in range(2, 6):
        assert HostileServer(file, run).introduced(asked()).problem == ""
    kinds = [(one.run, one.kind) for one in Answers(read_client(file)).read()]
    assert kinds == [(1, "training"), (4, "begun"), (5, "begun")]


def test_the_server_telling_it_back_is_no_news(file: Path) -> None:
    server = HostileServer(file)
    problem = server.introduced(one_by_one()).problem
    server.told(f"client {CLIENT} (node 3) cannot take part: {problem}")
    assert [one["about"] for one in refusals(file)] == ["run"]
    server.told("its key is registered under another name")
    assert [one["about"] for one in refusals(file)] == ["run", "client"]


def test_the_last_ones_are_kept_even_after_a_damaged_file(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for number in range(MOST + 3):
        note_refusal(folder, "client", f"reason {number}")
    lines = (folder / REFUSALS).read_text().splitlines()
    assert (len(lines), '"reason 3"' in lines[0]) == (MOST, True)
    last = last_refusal(folder)
    assert last is not None
    assert last.reason == f"reason {MOST + 2}"
    assert is_private(folder)
    (folder / REFUSALS).write_text("nothing\n")
    note_refusal(folder, "model", "why")
    assert '"why"' in (folder / REFUSALS).read_text()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name == "fedavg" else pytest.mark.slow)
        for name in METHODS
        if name != "local"
    ],
)
def test_every_method_trains_within_the_default_limits(file: Path, method: str) -> None:
    settings = asked(
        method=f"{{name: {method}}}",
        personalization="{}",
        model="{name: tiny_cnn, norm: batch}",
    )
    for server_round in (1, 2):
        HostileServer(file).train(settings, server_round)
