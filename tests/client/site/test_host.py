"""What a site says of itself, that it says no more, and what it keeps by run."""

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from knnper.client import site as host
from knnper.client.flower_node import without_folders
from knnper.client.runtime import ClientStateStore, _record, _reply
from knnper.client.site import KEPT, OWN_LOG, Discretion, SiteNode, run_states
from knnper.errors import CodecError, DataError, RefusedError, RunError
from knnper.experiment import to_json
from knnper.files import is_private
from knnper.simulation.flower_engine import VirtualNode
from knnper.simulation.workbench import over_sites
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.strategies.core.task import ClientResults
from knnper.transport.messages import (
    Introduction,
    Job,
    pack,
    read_introduction,
    to_content,
)
from tests.apps.site_grid import experiment, make_sites

EXPERIMENT = to_json(over_sites(experiment()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_sites(tmp_path, experiment())["0001"]


def context_of(file: Path, run: int = 1) -> Context:
    return Context(run, 1, {"config": str(file)}, RecordDict(), {})


def job(experiment: str = EXPERIMENT, timeout_s: float = 0.0, folder: str = "") -> Job:
    return Job(["0001"], 1, [0], experiment, timeout_s=timeout_s, shared_folder=folder)


def introduced(file: Path) -> Introduction:
    return read_introduction(SiteNode().introduce(context_of(file), job()))


def append(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text()}{line}\n")


def test_a_quiet_site_says_how_much_it_trains_on_and_no_more(file: Path) -> None:
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
    assert "John_Doe.npz" in problem
    assert str(file.parent) not in problem
    append(file, "share_metrics: false")
    assert introduced(file).problem == OWN_LOG
    assert str(file.parent / "shares/John_Doe.npz") in caplog.text
    with pytest.raises(RunError) as caught:
        SiteNode().open(context_of(file), job())
    assert str(caught.value) == OWN_LOG


def test_a_quiet_site_takes_no_part_where_updates_tell_of_its_data(file: Path) -> None:
    agnostic = experiment(method="{name: agnostic}", personalization="{}")
    asked = job(experiment=to_json(over_sites(agnostic)))
    site, context = SiteNode(), context_of(file, run=2)
    assert read_introduction(site.introduce(context, asked)).problem == ""
    append(file, "share_metrics: false")
    problem = read_introduction(site.introduce(context, asked)).problem
    assert "found share_metrics: false" in problem
    assert introduced(file).problem == "", "of kNN-Per"
    with pytest.raises(RefusedError, match="found share_metrics: false"):
        site.open(context, asked)
    append(file, "train: false")
    assert read_introduction(site.introduce(context, asked)).problem == ""


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


SETTINGS = experiment()


def test_a_second_run_finds_nothing_of_the_first(tmp_path: Path) -> None:
    first = ClientStateStore(run_states(tmp_path, SETTINGS, "aa"))
    first.save("site-a", 1, ModelPayload(torch.ones(2)), keep=[0])
    again = ClientStateStore(run_states(tmp_path, SETTINGS, "aa"))
    assert again.load(ModelPayload, "site-a", 1) is not None
    second = ClientStateStore(run_states(tmp_path, SETTINGS, "bb"))
    assert second.load(ModelPayload, "site-a", 1) is None


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    folders = [run_states(tmp_path, SETTINGS, str(one)) for one in range(KEPT + 2)]
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


QUIET, OPEN = Discretion(share_metrics=False), Discretion(share_metrics=True)
TROUBLE = "/home/site/patients/John_Doe.png cannot be read"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TROUBLE, "John_Doe.png cannot be read"),
        ("data/patients/x.png cannot be read", "x.png cannot be read"),
        ("no such file: '/home/a b/c d.npz'", "no such file: 'c d.npz'"),
        ("there is no /srv/data/train/; make it", "there is no train; make it"),
        ("expected ../x/y.csv, found ~/z.csv", "expected y.csv, found z.csv"),
        *(
            (one, one)
            for one in ("see https://a.org/b.html, and/or 1/2", "train/00012 has none")
        ),
        ("a client's file /a/b is the server's", "a client's file b is the server's"),
        ("/t/a.npz: expected /t/b.npz", "a.npz: expected b.npz"),
    ],
)
def test_a_path_leaves_as_the_name_of_its_file(text: str, told: str) -> None:
    assert without_folders(text) == told


def test_failures_are_told_in_words_that_tell_nothing() -> None:
    results = ClientResults((), {"site-a": TROUBLE})
    assert QUIET.results(results).failures == {"site-a": OWN_LOG}
    assert OPEN.results(results).failures == {"site-a": "John_Doe.png cannot be read"}


@pytest.mark.parametrize(
    "error", [DataError(TROUBLE), FileNotFoundError(2, "gone", TROUBLE), KeyError("x")]
)
def test_the_own_log_has_all_of_an_error(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError) as caught, QUIET.around("reading"):
        raise error
    assert str(caught.value) == OWN_LOG
    assert str(error) in caplog.text
    with pytest.raises(RunError, match=r"^ValueError: x\.png$"), OPEN.around("reading"):
        raise ValueError("/a/x.png")


def test_an_update_without_its_loss_keeps_its_weight() -> None:
    update = ModelUpdate(torch.ones(2), 3, 0.5)
    assert OPEN.update(update) is update
    quiet = QUIET.update(update)
    assert quiet.num_examples == 3
    assert math.isnan(quiet.train_loss)


PAYLOAD = ModelPayload(torch.ones(2))
NOWHERE = context_of(Path("client.yaml"))
OURS = "/dev/shm/knnper-12-0123abcd"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        (OURS, Path(OURS)),
        ("", None),
        ("/dev/shm", None),
        ("/dev/shm/other", None),
        (f"{OURS}/x", None),
        ("/etc/knnper-12-0123abcd", None),
        ("/dev/shm/x/../knnper-12-0123abcd", None),
    ],
)
def test_a_simulation_has_one_folder_in_memory(
    folder: str, allowed: Path | None
) -> None:
    assert VirtualNode().carrier_folder(NOWHERE, job(folder=folder)) == allowed
    assert SiteNode().carrier_folder(NOWHERE, job(folder=folder)) is None


def test_a_site_reads_no_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    packed = pack(PAYLOAD, tmp_path)
    before = list(tmp_path.iterdir())
    message = Message(
        to_content(job(folder=str(tmp_path)), {"payload": packed}),
        dst_node_id=1,
        message_type="train",
    )
    with pytest.raises(CodecError, match="names the file"):
        _record(message, "payload", ModelPayload, None)
    reply = _reply(message, PAYLOAD, None)
    assert list(tmp_path.iterdir()) == before
    assert "file" not in reply.content.config_records["reply.entry"]
