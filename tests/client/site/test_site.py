"""What a site says of itself, what it keeps by run, and what its limits refuse."""

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from knnper.audit_log import AuditLog, AuditLogError
from knnper.client import limits
from knnper.client import site as host
from knnper.client.client_app import _record, _reply
from knnper.client.runtime import ClientRuntime, TrainingRequest
from knnper.client.settings import read_client
from knnper.client.site import KEPT, SiteNode, run_states
from knnper.client.site_runtime import OWN_LOG, MetricsPolicy, SiteRuntime
from knnper.client.state_store import ClientStateStore
from knnper.errors import CodecError, DataError, RefusedError, RunError
from knnper.experiment import Experiment
from knnper.experiment_file import results_identity, to_json
from knnper.files import is_private
from knnper.simulation.catalogue import over_sites
from knnper.simulation.flower_engine import VirtualNode
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.transport.messages import (
    IN_MESSAGE,
    Files,
    Introduction,
    Job,
    pack,
    read_introduction,
    to_content,
)
from tests.apps.site_grid import experiment, make_sites
from tests.strategies.tiny import OF_STATISTICS, WITHOUT_BATCH_NORM

EXPERIMENT = to_json(over_sites(experiment()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_sites(tmp_path, experiment())[CLIENT]


def context_of(file: Path, run: int = 1) -> Context:
    return Context(run, 1, {"config": str(file)}, RecordDict(), {})


def job(experiment: str = EXPERIMENT, timeout_s: float = 0.0, folder: str = "") -> Job:
    return Job(["0001"], 1, [0], experiment, timeout_s=timeout_s, shared_folder=folder)


def introduced(file: Path) -> Introduction:
    return read_introduction(SiteNode().introduce(context_of(file), job()))


def append(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text()}{line}\n")


def test_site_without_shared_metrics_sends_its_training_size_only(file: Path) -> None:
    whole = introduced(file)
    assert min(whole.num_train, whole.num_validation, whole.num_test) > 0
    append(file, "share_metrics: false")
    quiet = introduced(file)
    assert is_private(file.parent / "state-0001")
    assert quiet.num_train == whole.num_train
    assert (quiet.num_validation, quiet.num_test) == (0, 0)


def test_why_a_site_cannot_take_part(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(file.read_text().replace("shares/0001", "shares/John_Doe"))
    problem = introduced(file).problem
    assert "(missing_file)" in problem
    assert "John_Doe" not in problem
    assert str(file.parent / "shares/John_Doe.npz") in caplog.text
    append(file, "share_metrics: false")
    assert introduced(file).problem == OWN_LOG


def test_what_is_left_of_the_deadline_is_for_the_training(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.monotonic()
    slow = host.site_data

    def read(*arguments: Any) -> Any:
        time.sleep(0.2)
        return slow(*arguments)

    monkeypatch.setattr(host, "site_data", read)
    worker = SiteNode().open(context_of(file), job(timeout_s=100.0))
    assert before + 100 <= worker.deadline.at < time.monotonic() + 100 - 0.2
    endless = SiteNode().open(context_of(file), job())
    assert endless.deadline.at == float("inf")


CLIENT = "0001"
SETTINGS = experiment()


def test_a_second_run_finds_nothing_of_the_first(tmp_path: Path) -> None:
    first = ClientStateStore(run_states(tmp_path, SETTINGS, "aa"))
    first.save("site-a", 1, ModelPayload(torch.ones(2)), keep=[0])
    again = ClientStateStore(run_states(tmp_path, SETTINGS, "aa"))
    assert again.load(ModelPayload, "site-a", 1) is not None
    second = ClientStateStore(run_states(tmp_path, SETTINGS, "bb"))
    assert second.load(ModelPayload, "site-a", 1) is None


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    folders = [
        run_states(tmp_path, SETTINGS, str(number)) for number in range(KEPT + 2)
    ]
    for age, folder in enumerate(folders[:-1]):
        folder.mkdir(parents=True)
        os.utime(folder, (age, age))
    assert run_states(tmp_path, SETTINGS, "0") == folders[0]  # it is used again
    run_states(tmp_path, SETTINGS, str(KEPT + 1)).mkdir()
    left = {path for path in folders if path.exists()}
    assert left == {folders[0], *folders[3:]}
    assert len(left) == KEPT


@pytest.mark.parametrize("session", ["../../etc", "a/b", "a" * 65, ".."])
def test_a_session_is_no_path(tmp_path: Path, session: str) -> None:
    with pytest.raises(RunError, match="expected a session of at most 64 letters"):
        run_states(tmp_path, SETTINGS, session)


QUIET, OPEN = MetricsPolicy(share_metrics=False), MetricsPolicy(share_metrics=True)
TROUBLE = "/home/site/patients/John_Doe.png cannot be read"


@pytest.mark.parametrize(
    "error", [DataError(TROUBLE), FileNotFoundError(2, "gone", TROUBLE), KeyError("x")]
)
@pytest.mark.parametrize("metrics_policy", [QUIET, OPEN])
def test_own_log_has_error_in_full(
    error: Exception, metrics_policy: MetricsPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    text = metrics_policy.explain(error)
    assert str(error) in caplog.text
    assert "John_Doe" not in text
    assert (text == OWN_LOG) is (metrics_policy is QUIET)


def test_an_update_without_its_loss_keeps_its_weight() -> None:
    update = ModelUpdate(torch.ones(2), 3, 0.5)
    assert OPEN.filter_update(update) is update
    quiet = QUIET.filter_update(update)
    assert quiet.num_examples == 3
    assert math.isnan(quiet.train_loss)


PAYLOAD = ModelPayload(torch.ones(2))
NOWHERE = context_of(Path("client.yaml"))
OURS = "/dev/shm/knnper-12-0123abcd"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        (OURS, OURS),
        ("object_store", "object_store"),
        ("", ""),
        ("/dev/shm", ""),
        ("/dev/shm/other", ""),
        (f"{OURS}/x", ""),
        ("/etc/knnper-12-0123abcd", ""),
        ("/dev/shm/x/../knnper-12-0123abcd", ""),
    ],
)
def test_a_simulation_has_one_folder_in_memory(folder: str, allowed: str) -> None:
    assert VirtualNode().carrier(NOWHERE, job(folder=folder)).name == allowed
    assert SiteNode().carrier(NOWHERE, job(folder=folder)) is IN_MESSAGE


def test_a_site_reads_no_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    packed = pack(PAYLOAD, Files(tmp_path, least_bytes=0))
    before = list(tmp_path.iterdir())
    message = Message(
        to_content(job(folder=str(tmp_path)), {"payload": packed}),
        dst_node_id=1,
        message_type="train",
    )
    with pytest.raises(CodecError, match="names the file"):
        _record(message, "payload", ModelPayload, IN_MESSAGE)
    reply = _reply(message, PAYLOAD, IN_MESSAGE)
    assert list(tmp_path.iterdir()) == before
    assert "file" not in reply.content.config_records["reply.entry"]


def test_no_answer_leaves_without_an_entry_in_the_audit_log(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    node, context = SiteNode(), context_of(file)
    node.open(context, job())
    node.answered(message, context)
    log = AuditLog.of(file.parent / f"state-{CLIENT}")
    log.path.write_text(log.path.read_text().replace("train", "query"))
    with pytest.raises(AuditLogError, match="move it elsewhere") as damage:
        node.answered(message, context)
    reply = node.failed(message, context, damage.value)
    assert "(unusable_state)" in str(reply.error.reason)


def asked(**changes: object) -> Experiment:
    """Return an experiment over sites; keys are dotted, values YAML."""
    return over_sites(experiment(**changes))


def one_by_one(**changes: object) -> Experiment:
    """Return the experiment whose every update is the gradient of one image."""
    return asked(
        **{
            "model": "{name: softmax_regression}",
            "method": "{name: fedavg}",
            "personalization": "{}",
            "training.batch_size": 1,
            "training.local_steps": 1,
            **changes,
        }
    )


@dataclass(frozen=True)
class HostileServer:
    """One run of it, against the site that a file describes."""

    file: Path
    run: int = 1

    def introduced(self, settings: Experiment) -> Introduction:
        job = Job([], 0, [0], to_json(settings))
        return read_introduction(SiteNode().introduce(self._context, job))

    def worker(self, settings: Experiment) -> SiteRuntime:
        """Return what answers a message, as a process of its own would."""
        return SiteNode().open(self._context, Job([CLIENT], 1, [0], to_json(settings)))

    def payload(self, settings: Experiment) -> Any:
        """Return what an honest server would send first."""
        runtime = self.worker(settings)
        state = runtime.method.init([CLIENT, "0000", "0003"], runtime.key)
        return runtime.method.broadcast(state, CLIENT, runtime.key)

    def train(self, settings: Experiment, server_round: int = 1) -> tuple[Any, Any]:
        """Return what was sent in a round, and the update."""
        payload, worker = self.payload(settings), self.worker(settings)
        return payload, worker.train(
            TrainingRequest(CLIENT, payload, server_round, 0, [0])
        )

    def told(self, reason: str) -> None:
        """Say that the site may not take part."""
        SiteNode().refused(self._context, reason)

    @property
    def _context(self) -> Context:
        config: dict[str, Any] = {"config": str(self.file)}
        return Context(self.run, 1, config, RecordDict(), {})


def image_of(sent: Tensor, trained: Tensor, worker: SiteRuntime) -> Tensor:
    """Return the image behind one step on it, uint8 (pixels,)."""
    spec = worker.spec
    gradient = (sent - trained).double()
    num_classes = spec.num_classes
    of_bias = gradient[-num_classes:]
    of_rows = gradient[:-num_classes].reshape(num_classes, -1)
    largest = of_bias.abs().argmax()
    pixels = of_rows[largest] / of_bias[largest] * spec.std[0] + spec.mean[0]
    return (255 * pixels).round().clamp(0, 255).to(torch.uint8)


OF_FEDAVG = {"method": "{name: fedavg}", "personalization": "{}"}
OTHER_RATE = {"training.learning_rate": 0.5}


def limit(file: Path, *lines: str) -> None:
    """Give a site limits; each line is ``key: value``."""
    file.write_text(f"{file.read_text()}limits: {{{', '.join(lines)}}}\n")


def state(file: Path) -> Path:
    return file.parent / f"state-{CLIENT}"


def refusals(file: Path) -> list[dict[str, str]]:
    text = (state(file) / limits.REFUSALS).read_text()
    return [json.loads(line) for line in text.splitlines()]


def not_trained(server: HostileServer, settings: Any, words: str) -> None:
    """Refused to whoever does not ask before it sends."""
    with pytest.raises(RefusedError, match=words):
        server.train(settings)


def refused(server: HostileServer, settings: Any, *words: str) -> None:
    """Refused as it is introduced, too."""
    problem = server.introduced(settings).problem
    assert all(word in problem for word in words), problem
    not_trained(server, settings, words[0])


def test_the_reconstruction_attack_is_refused_by_default(file: Path) -> None:
    for run in (1, 2, 3):
        refused(HostileServer(file, run), one_by_one(), "limits.min_examples")
    (noted,) = refusals(file)
    assert noted["about"] == "run"
    assert all(word in noted["reason"] for word in ("found 1 examples", "expected 32"))


def test_without_limits_it_gives_an_image_bit_for_bit(file: Path) -> None:
    limit(file, "min_examples: 1")
    server = HostileServer(file)
    sent, update = server.train(one_by_one())
    worker = server.worker(one_by_one())
    image = image_of(sent.weights, update.weights, worker)
    images = worker.source.data(CLIENT).train.images
    assert (images.reshape(len(images), -1) == image).all(dim=1).any()


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
    answer = server.introduced(asked())
    assert (answer.problem, answer.train) == ("", False)
    assert "limits.min_examples" in answer.remark
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
    labels = worker.source.data(CLIENT).train.labels
    counts = torch.bincount(labels, minlength=10)
    rare = int(counts.where((counts > 0) & (counts < 32), 1000).argmin())
    assert 0 < counts[rare] < 32
    payload = server.payload(settings)
    factors = torch.full_like(payload.label_factors, 1e-9)
    factors[rare] = 1.0
    hostile = dataclasses.replace(payload, label_factors=factors)
    with pytest.raises(RefusedError, match=f"found {counts[rare]} examples"):
        worker.train(TrainingRequest(CLIENT, hostile, 1, 0, [0]))
    worker.train(TrainingRequest(CLIENT, payload, 1, 0, [0]))


def test_site_without_shared_metrics_refuses_methods_that_reveal_data(
    file: Path,
) -> None:
    settings = asked(method="{name: agnostic}", personalization="{}")
    append(file, "share_metrics: false")
    refused(HostileServer(file), settings, "found share_metrics: false")
    assert HostileServer(file, run=2).introduced(asked()).problem == "", "of kNN-Per"
    append(file, "train: false")
    assert HostileServer(file, run=3).introduced(settings).problem == ""


def test_methods_and_models_are_reported_together(file: Path) -> None:
    limit(file, "methods: [knn_per, ditto]", "models: []")
    words = "method fedavg, expected knn_per, ditto", "tiny_cnn, expected none"
    refused(HostileServer(file), asked(**OF_FEDAVG), *words)


def test_a_pinned_experiment_is_the_only_one(file: Path) -> None:
    allowed_run, other_run = asked(), asked(**OTHER_RATE)
    pinned = results_identity(allowed_run)
    limit(file, f"experiment: {pinned}")
    server = HostileServer(file)
    refused(server, other_run, "limits.experiment", pinned, results_identity(other_run))
    assert server.introduced(allowed_run).problem == ""
    server.train(allowed_run)


def test_a_run_stays_with_the_experiment_that_it_began_with(file: Path) -> None:
    server, other = HostileServer(file), asked(**OTHER_RATE)
    assert server.introduced(asked()).problem == ""
    not_trained(server, other, "as when this run began")
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
    answers = limits.Answers(read_client(file))
    answers.note(
        limits.Answer(datetime.now(UTC) - timedelta(days=31), 9, "e", "training")
    )
    assert answers.num_left("training", answers.read()) == left


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
    assert worker.validate([CLIENT], payload).reference.num_examples > 0
    shown = worker.personalize([CLIENT], payload, payload, [2])
    assert len(shown.results) + len(shown.failures) == 1
    again = HostileServer(file, run=2).worker(asked())
    with pytest.raises(RefusedError, match=r"2 of 2 in 30 days \(limits.validation"):
        again.validate([CLIENT], payload)
    hidden = again.personalize([CLIENT], payload, payload, [2])
    assert (hidden.results, len(hidden.withheld) + len(hidden.failures)) == ((), 1)


def test_a_site_weighs_candidates_by_its_own_evidence(file: Path) -> None:
    settings = asked(method="{name: fedavg}", personalization="auto")
    server = HostileServer(file)
    payload = server.payload(settings)
    results = server.worker(settings).personalize([CLIENT], payload, payload, [0])
    (result,) = results.results
    weights = [v for name, v in result.chosen.items() if name.startswith("weight_of_")]
    assert len(weights) == 4
    assert sum(weights) == pytest.approx(1)


def test_what_was_answered_must_be_known(file: Path) -> None:
    HostileServer(file).train(asked())
    (state(file) / limits.ANSWERS).write_text('{"kind": "training"}\n')
    with pytest.raises(RunError, match=r"damaged.*remove the file"):
        HostileServer(file).train(asked())


def test_runs_do_not_fill_the_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_BEGUN", 2)
    monkeypatch.setattr(limits, "_COMPACT_BEYOND_BYTES", 0)
    HostileServer(file, run=1).train(asked())
    for run in range(2, 6):
        assert HostileServer(file, run).introduced(asked()).problem == ""
    kinds = [
        (answer.run, answer.kind) for answer in limits.Answers(read_client(file)).read()
    ]
    assert kinds == [(1, "training"), (4, "begun"), (5, "begun")]


def test_the_server_telling_it_back_is_no_news(file: Path) -> None:
    server = HostileServer(file)
    problem = server.introduced(one_by_one()).problem
    server.told(f"client {CLIENT} (node 3) cannot take part: {problem}")
    assert [refusal["about"] for refusal in refusals(file)] == ["run"]
    server.told("its key is registered under another name")
    assert [refusal["about"] for refusal in refusals(file)] == ["run", "client"]


def test_last_answers_are_kept_after_a_damaged_file(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for number in range(limits.MAX_REFUSALS + 3):
        limits.note_refusal(folder, "client", f"reason {number}")
    lines = (folder / limits.REFUSALS).read_text().splitlines()
    assert (len(lines), '"reason 3"' in lines[0]) == (limits.MAX_REFUSALS, True)
    last = limits.last_refusal(folder)
    assert last is not None
    assert last.reason == f"reason {limits.MAX_REFUSALS + 2}"
    assert is_private(folder)
    (folder / limits.REFUSALS).write_text("nothing\n")
    limits.note_refusal(folder, "model", "why")
    assert '"why"' in (folder / limits.REFUSALS).read_text()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name == "fedavg" else pytest.mark.slow)
        for name in METHODS
        if name != "local"
    ],
)
def test_every_method_trains_within_the_default_limits(file: Path, method: str) -> None:
    norm = "none" if method in WITHOUT_BATCH_NORM else "batch"
    trained, num_rounds = ("head", 1) if method in OF_STATISTICS else ("all", 2)
    settings = asked(
        **{
            "method": f"{{name: {method}}}",
            "personalization": "{}",
            "model": f"{{name: tiny_cnn, norm: {norm}, trained: {trained}}}",
            "training.num_rounds": num_rounds,
        }
    )
    for server_round in range(1, num_rounds + 1):
        HostileServer(file).train(settings, server_round)


def test_noise_on_examples_is_not_from_the_seed(file: Path) -> None:
    noise = "{clip_norm: 1.0, noise_multiplier: 1.0}"
    private = asked(**OF_FEDAVG | {"training.example_privacy": noise})
    updates = [HostileServer(file).train(private)[1] for _ in range(2)]
    assert not torch.equal(updates[0].weights, updates[1].weights)
    assert math.isnan(updates[0].train_loss)
    plain = asked(**OF_FEDAVG)
    updates = [HostileServer(file, run=2).train(plain)[1] for _ in range(2)]
    assert torch.equal(updates[0].weights, updates[1].weights)
