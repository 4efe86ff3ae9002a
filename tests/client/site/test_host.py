"""What a site says of itself, and that it says no more."""

import time
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from knnper.client import site as host
from knnper.client.site import OWN_LOG, SiteNode
from knnper.errors import RefusedError, RunError
from knnper.files import is_private
from knnper.loading import to_json
from knnper.simulation.workbench import over_sites
from knnper.transport.messages import Introduction, Job, read_introduction
from tests.apps.site_grid import experiment, make_sites

EXPERIMENT = to_json(over_sites(experiment()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_sites(tmp_path, experiment())["0001"]


def context_of(file: Path, run: int = 1) -> Context:
    return Context(run, 1, {"config": str(file)}, RecordDict(), {})


def job(**changes: object) -> Job:
    values = {
        "server_round": 1,
        "keep_rounds": [0],
        "experiment": EXPERIMENT,
        **changes,
    }
    return Job(["0001"], **values)  # type: ignore[arg-type]


def introduced(file: Path) -> Introduction:
    return read_introduction(SiteNode().introduce(context_of(file), job()))


def append(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text()}{line}\n")


def test_a_quiet_site_says_how_much_it_trains_on_and_no_more(file: Path) -> None:
    whole = introduced(file)
    assert min(whole.num_train, whole.num_validation, whole.num_test) > 0
    append(file, "share_metrics: false")
    quiet = introduced(file)
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


def test_a_quiet_site_that_cannot_play_says_no_more_either(file: Path) -> None:
    file.write_text(file.read_text().replace("shares/0001", "shares/John_Doe"))
    append(file, "share_metrics: false")
    with pytest.raises(RunError) as caught:
        SiteNode().open(context_of(file), job())
    assert str(caught.value) == OWN_LOG


def of_agnostic() -> str:
    settings = experiment(method="{name: agnostic}", personalization="{}")
    return to_json(over_sites(settings))


def test_a_quiet_site_takes_no_part_where_updates_tell_of_its_data(file: Path) -> None:
    asked = job(experiment=of_agnostic())
    site, context = SiteNode(), context_of(file, run=2)
    assert read_introduction(site.introduce(context, asked)).problem == ""
    append(file, "share_metrics: false")
    problem = read_introduction(site.introduce(context, asked)).problem
    assert "found share_metrics: false" in problem
    assert introduced(file).problem == "", "of kNN-Per"
    append(file, "train: false")
    assert read_introduction(site.introduce(context, asked)).problem == ""


def test_it_does_not_train_whoever_asks(file: Path) -> None:
    append(file, "share_metrics: false")
    with pytest.raises(RefusedError, match="found share_metrics: false"):
        SiteNode().open(context_of(file), job(experiment=of_agnostic()))


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


def test_what_is_kept_of_the_data_is_the_owners_alone(file: Path) -> None:
    introduced(file)
    assert is_private(file.parent / "state-0001")


def test_states_are_kept_by_run(file: Path) -> None:
    with pytest.raises(RunError, match="expected a session"):
        SiteNode().open(context_of(file), job(session="../other"))
