"""Which clients have a run's model: what is kept of it, and what is read again."""

import dataclasses
import json
from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.server.run_folder import DistributionLog
from knnper.strategies.core.predictors import ClientResult, Evaluation


@pytest.fixture
def log(tmp_path: Path) -> DistributionLog:
    return DistributionLog(tmp_path / "served.jsonl")


def result(name: str, num_correct: int = 1) -> ClientResult:
    evaluation = Evaluation(3, num_correct, 0.1 + 0.2, (1, 2), (1 / 3, 0.7), (0, 1))
    return ClientResult(
        name, True, 5, 2, evaluation, evaluation, evaluation, {"knn_weight": 1 / 3}
    )


def served(reported: ClientResult) -> tuple[str, ClientResult]:
    return reported.client, reported


def test_client_results_belong_to_a_model(log: DistributionLog) -> None:
    assert log.reported("m1") == {}
    log.append("m0", *served(result("a", 0)))
    log.append("m1", *served(result("a", 1)))
    log.append("m1", *served(result("b", 2)))
    assert log.reported("m1") == {"a": result("a", 1), "b": result("b", 2)}
    log.append("m1", "c", None)
    assert log.reported("m1")["c"] is None


def test_weights_of_labels_are_kept(log: DistributionLog) -> None:
    plain = result("a")
    tested = dataclasses.replace(
        plain.personal, weight_sum=0.1 + 0.2, weight_correct=0.1
    )
    reported = dataclasses.replace(plain, personal=tested)
    log.append("m", *served(reported))
    assert log.reported("m") == {"a": reported}


def test_results_from_before_there_were_weights_are_read(log: DistributionLog) -> None:
    document = dataclasses.asdict(result("a"))
    for which in ("personal", "reference", "validation"):
        del document[which]["weight_sum"], document[which]["weight_correct"]
    line = json.dumps({"model": "m", "result": document})
    log.path.write_text(f"{line}\n")
    assert log.reported("m") == {"a": result("a")}


def test_a_torn_line_is_dropped_and_not_built_upon(log: DistributionLog) -> None:
    path = log.path
    log.append("m", *served(result("a")))
    whole = path.read_bytes()
    log.append("m", *served(result("b")))
    torn_line = path.read_bytes()[len(whole) :]
    for length in range(0, len(torn_line), 20):
        path.write_bytes(whole + torn_line[:length])
        assert list(log.reported("m")) == ["a"]
    log.append("m", *served(result("c")))
    assert list(log.reported("m")) == ["a", "c"]


def test_a_damaged_line_before_the_last_is_an_error(log: DistributionLog) -> None:
    path = log.path
    log.append("m", *served(result("a")))
    path.write_bytes(b'{"model\n' + path.read_bytes())
    with pytest.raises(RunError, match=r"line 1 of .*served\.jsonl is damag"):
        log.reported("m")
    path.write_text(json.dumps({"model": "m", "result": {"client": 3}}) + "\n")
    with pytest.raises(RunError, match="is no client's result"):
        log.reported("m")
