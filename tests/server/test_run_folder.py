import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import knnper
from knnper.errors import CheckpointError, ConfigError, RunError
from knnper.experiment_file import results_identity
from knnper.files import JsonLines, draft_of
from knnper.records import fingerprint
from knnper.server.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    History,
    rounds_in,
)
from knnper.server.distribution_log import DistributionLog, ShownResults
from knnper.server.run_folder import RunFolder
from knnper.server.screening import Norms
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.evaluation import ClientResult, Evaluation
from knnper.strategies.core.records import ModelState
from tests.apps.site_grid import experiment

EXPERIMENT = experiment()


def result(name: str, num_correct: int = 1) -> ClientResult:
    evaluation = Evaluation(3, num_correct, 0.1 + 0.2, (1, 2), (1 / 3, 0.7), (0, 1))
    return ClientResult(
        name, True, 5, 2, evaluation, evaluation, evaluation, {"knn_weight": 1 / 3}
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "demo", EXPERIMENT)


def test_a_new_folder_holds_the_experiment(folder: RunFolder) -> None:
    assert [path.name for path in folder.path.iterdir()] == [".lock", "experiment.yaml"]
    assert RunFolder.open(folder.path) == folder
    assert folder.experiment(experiment_catalogue()) == EXPERIMENT


def test_earlier_run_is_kept_without_overwrite(folder: RunFolder) -> None:
    folder.append_round({"server_round": 1})
    with pytest.raises(RunError, match=r"holds a run already.*--resume.*--overwrite"):
        RunFolder.create(folder.path, EXPERIMENT)
    assert folder.rounds() == [{"server_round": 1}]


def a_run_of(folder: RunFolder, num_rounds: int) -> None:
    checkpoints = CheckpointFolder(folder.checkpoints, "abc")
    for number in range(1, num_rounds + 1):
        folder.append_round({"server_round": number, "train_loss": float(number)})
        checkpoints.save(number, ModelState(torch.full((2,), float(number))))
    folder.write_clients_csv([result("a")])
    folder.write_results({"of": num_rounds})


def test_going_back_deletes_what_came_after_the_round(folder: RunFolder) -> None:
    a_run_of(folder, 9)
    folder.go_back(6)
    assert not folder.is_finished()
    assert [record["server_round"] for record in folder.rounds()] == list(range(1, 7))
    assert rounds_in(folder.checkpoints) == [4, 5, 6]
    folder.go_back(4)
    assert CheckpointFolder(folder.checkpoints, "abc").rounds_for_clients() == [4]


def test_a_round_without_a_checkpoint_is_refused(folder: RunFolder) -> None:
    with pytest.raises(RunError, match=r"\(none\), found 3"):
        folder.go_back(3)
    a_run_of(folder, 9)
    with pytest.raises(RunError, match=r"\(4, 5, 6, 7, 8, 9\), found 3"):
        folder.go_back(3)
    assert folder.is_finished()


def test_a_run_has_one_session(folder: RunFolder) -> None:
    assert folder.session() == folder.session()
    before = folder.session()
    again = RunFolder.create(folder.path, EXPERIMENT, overwrite=True)
    assert again.session() != before


def test_overwriting_leaves_nothing_of_the_earlier_run(
    folder: RunFolder, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (folder.path / "link").symlink_to(outside)
    (folder.path / "checkpoints" / "round-000001").mkdir(parents=True)
    folder.append_round({"server_round": 1})
    fresh = RunFolder.create(folder.path, EXPERIMENT, overwrite=True)
    left = sorted(path.name for path in fresh.path.iterdir())
    assert left == [".lock", "experiment.yaml"]
    assert (outside / "precious").exists()


@pytest.mark.parametrize("content", [None, "name: mine\n", ""])
def test_create_never_overwrites_a_folder_without_a_run(
    tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "thesis.tex").touch()
    if content is not None:
        (tmp_path / "experiment.yaml").write_text(content)
    with pytest.raises(RunError, match="is not empty and holds no run"):
        RunFolder.create(tmp_path, EXPERIMENT, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_create_removes_the_draft_of_a_killed_process(tmp_path: Path) -> None:
    draft = draft_of(tmp_path / "experiment.yaml")
    draft.write_text("torn")
    (tmp_path / ".lock").touch()
    RunFolder.create(tmp_path, EXPERIMENT)
    assert not draft.exists()


def test_draft_of_another_process_is_never_deleted(tmp_path: Path) -> None:
    draft = draft_of(tmp_path / "thesis.tex")
    draft.write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        RunFolder.create(tmp_path, EXPERIMENT, overwrite=True)
    assert draft.read_text() == "mine"


def test_missing_experiment_and_file_in_place_of_folder_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(RunError, match=r"holds no run: experiment\.yaml is missing"):
        RunFolder.open(tmp_path)
    path = tmp_path / "demo"
    path.touch()
    with pytest.raises(RunError, match="is a file; expected a folder"):
        RunFolder.create(path, EXPERIMENT)


def test_a_resumed_run_stays_the_same_experiment(folder: RunFolder) -> None:
    resumed = folder.experiment(experiment_catalogue(), ["run.num_workers=3"])
    assert resumed.run.num_workers == 3
    with pytest.raises(ConfigError, match=r"found run\.seed=1, which makes it another"):
        folder.experiment(experiment_catalogue(), ["run.seed=1"])


def test_the_first_manifest_stays(folder: RunFolder) -> None:
    folder.write_manifest(EXPERIMENT, "abc", ("knnper", "simulate"))
    first = folder.manifest()
    assert first["results_identity"] == results_identity(EXPERIMENT)
    assert first["partition_hash"] == "abc"
    assert (first["command"], first["resumed"]) == (["knnper", "simulate"], [])
    assert first["versions"]["knnper"] == knnper.__version__
    assert first["versions"]["flwr"].startswith("1.")
    assert first["num_cpus"] >= 1
    folder.write_manifest(EXPERIMENT, "abc", ["knnper", "--resume"])
    (again,) = folder.manifest()["resumed"]
    assert again["command"] == ["knnper", "--resume"]
    assert datetime.fromisoformat(again["started"]).tzinfo is not None
    assert folder.manifest() == {**first, "resumed": [again]}
    with pytest.raises(RunError, match="expected the split abc, found xyz"):
        folder.write_manifest(EXPERIMENT, "xyz", ["knnper"])


def test_results(folder: RunFolder) -> None:
    folder.write_results({"loss": float("nan"), "third": 1 / 3, "missing": None})
    assert folder.results() == {"loss": None, "third": 1 / 3, "missing": None}
    assert [path.name for path in folder.path.glob(".*")] == [".lock"], "no draft"


def test_run_led_by_one_process_is_refused_to_others(folder: RunFolder) -> None:
    a_run_of(folder, 3)
    another = RunFolder.open(folder.path)
    with folder.locked():
        with pytest.raises(RunError, match="another process"), another.locked():
            pass
        with pytest.raises(RunError, match="another process"):
            another.go_back(2)
        with pytest.raises(RunError, match="another process is at work"):
            RunFolder.create(folder.path, EXPERIMENT, overwrite=True)
    folder.require_idle()
    with another.locked():
        assert folder.is_finished()


def test_unfinished_and_damaged_runs(folder: RunFolder) -> None:
    with pytest.raises(RunError, match=r"results\.json is missing.*--resume"):
        folder.results()
    (folder.path / "results.json").write_text('{"seen":')
    with pytest.raises(RunError, match=r"results\.json is damaged, expected JSON"):
        folder.results()
    (folder.path / "results.json").write_text("[]")
    with pytest.raises(RunError, match="expected a JSON object"):
        folder.results()


def test_rounds_to_be_repeated_are_dropped(folder: RunFolder) -> None:
    folder.drop_rounds_after(0)
    for server_round in (1, 2, 3):
        folder.append_round({"server_round": server_round, "train_loss": float("nan")})
    folder.drop_rounds_after(1)
    assert folder.rounds() == [{"server_round": 1, "train_loss": None}]


def test_json_lines_hold_objects_only(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    assert lines.read() == []
    lines.path.write_text("3\n")
    with pytest.raises(RunError, match="expected one JSON object a line"):
        lines.read()
    lines.replace([{"a": 1}, {"b": 2}])
    assert lines.read() == [{"a": 1}, {"b": 2}]


def state(value: float) -> ModelState:
    return ModelState(torch.full((5,), value))


def latest_of(folder: CheckpointFolder) -> Checkpoint:
    latest = folder.load_latest(ModelState)
    assert latest is not None
    return latest


def test_the_newest_comes_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", "abc")
    assert folder.load_latest(ModelState) is None
    for server_round in (1, 2, 3):
        folder.save(server_round, state(float(server_round)))
    latest = latest_of(folder)
    assert latest.server_round == 3
    assert latest.state.weights.tolist() == [3.0] * 5
    assert latest.fingerprint == fingerprint(state(3.0))


@pytest.mark.parametrize(
    ("most", "every", "expected"),
    [
        (1, 1, [100]),
        (6, 1, [80, 88, 96, 98, 99, 100]),
        (6, 5, [40, 80, 85, 90, 95, 100]),
        (6, 20, [20, 40, 60, 80, 100]),
    ],
)
def test_older_checkpoints_are_kept_at_growing_distances(
    tmp_path: Path, most: int, every: int, expected: list[int]
) -> None:
    folder = CheckpointFolder(tmp_path, "abc", most)
    assert folder.rounds_for_clients() == [0]
    for server_round in range(every, 101, every):
        folder.save(server_round, state(1.0))
    assert folder.rounds_for_clients() == folder.rounds() == expected


class _Slow(CheckpointFolder):
    """Writes when it is told to; the second time it cannot."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "abc")
        self.may_write = threading.Event()

    def save(self, server_round: int, *arguments: Any) -> Checkpoint:
        assert self.may_write.wait(30)
        if server_round == 2:
            raise OSError("no space left")
        return super().save(server_round, *arguments)


def test_a_checkpoint_is_written_aside_and_its_error_is_not_lost(
    tmp_path: Path,
) -> None:
    folder = _Slow(tmp_path)
    with CheckpointWriter(folder) as writer:
        assert writer.latest() is None
        writer.save(1, state(1.0), History(), ())
        assert folder.rounds() == []  # and nobody has waited for it
        folder.may_write.set()
        written = writer.latest()
        assert written is not None
        assert written.fingerprint == fingerprint(state(1.0))
        assert folder.rounds() == [1]
        writer.save(2, state(2.0), History(), ())
        with pytest.raises(OSError, match="no space"):
            writer.save(3, state(3.0), History(), ())
        with pytest.raises(OSError, match="no space"):
            writer.latest()
    assert folder.rounds() == [1]


def test_no_checkpoint_is_being_written_after_the_context(tmp_path: Path) -> None:
    folder = _Slow(tmp_path)
    later = threading.Timer(0.1, folder.may_write.set)
    with contextlib.suppress(KeyboardInterrupt), CheckpointWriter(folder) as writer:
        writer.save(1, state(1.0), History(), ())
        later.start()
        raise KeyboardInterrupt
    assert folder.rounds() == [1]


def test_history_survives_a_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    norms = {"weights": Norms([0.1, 1 / 3], 0.1)}
    history = History(norms, lowest_loss=2 / 3, trained_in={"a": 2})
    folder.save(1, state(1.0))
    folder.save(2, state(2.0), history)
    latest = latest_of(folder)
    assert latest.history == history
    assert latest.history.state_rounds(["b", "a"], 9) == (0, 2)


names = st.sampled_from("abcdefghij")


@given(
    st.dictionaries(st.text("klmnopqrst", min_size=2, max_size=2), st.just(0)),
    st.lists(st.sets(names, max_size=3), max_size=12),
)
@settings(deadline=None, max_examples=60)
def test_last_training_rounds_equal_those_of_a_dictionary(
    before: dict[str, int], rounds: list[set[str]]
) -> None:
    histories, expected = [History(trained_in=before)], [dict(before)]
    for server_round, used in enumerate(map(sorted, rounds), start=1):
        histories.append(histories[-1].after(server_round, {}, None, used))
        expected.append(expected[-1] | dict.fromkeys(used, server_round))
    # Earlier ones have not changed.
    assert [history.trained_in for history in histories] == expected
    for history, known in zip(histories, expected, strict=True):
        assert list(history.trained_in or ()) == list(known)
        clients = [*known, "nobody"]
        assert history.state_rounds(clients, 9) == (*known.values(), 0)


def test_history_of_many_clients_survives_a_checkpoint(tmp_path: Path) -> None:
    history = History(trained_in=dict.fromkeys(map(str, range(100)), 1))
    history = history.after(2, {}, None, ["7", "x"])
    assert history.trained_in is not None
    folder = CheckpointFolder(tmp_path, "abc")
    folder.save(2, state(1.0), history)
    assert latest_of(folder).history == history
    text = (tmp_path / "round-000002" / "manifest.json").read_text()
    assert list(json.loads(text)["history"]["trained_in"]) == list(history.trained_in)


def flip_a_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def cut_off(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize("damage", [flip_a_bit, cut_off])
def test_a_damaged_one_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    folder.save(1, state(1.0))
    folder.save(2, state(2.0))
    tensors = tmp_path / "round-000002" / "state.safetensors"
    tensors.write_bytes(damage(tensors.read_bytes()))
    with caplog.at_level(logging.WARNING):
        latest = latest_of(folder)
    assert latest.server_round == 1
    assert "damaged" in caplog.text


def test_flipped_byte_in_checkpoint_is_noticed_or_harmless(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    history = History(
        norms={"weights": Norms([0.125, 1 / 3], 0.25)},
        lowest_loss=2 / 3,
        trained_in={"a": 2, "b": 1},
        gains=[{"a": 0.5}, {"a": 0.25, "b": 1.0}],
    )
    earlier = [Checkpoint(1, state(1.0), "")]
    folder.save(2, state(2.0), history, earlier)
    saved = latest_of(folder)
    files = [tmp_path / "gains.jsonl", *(tmp_path / "round-000002").iterdir()]
    assert sorted(path.name for path in files) == [
        *("earlier-000001.safetensors", "gains.jsonl", "manifest.json"),
        *("manifest.sha256", "state.safetensors"),
    ]
    for path in files:
        content = path.read_bytes()
        # Each byte of the manifest; of files that have a checksum, a part.
        step = 1 if path.name.startswith("manifest") else 7
        for place in range(0, len(content), step):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            with contextlib.suppress(RunError):
                checkpoint = latest_of(folder)
                assert fingerprint(checkpoint.state) == fingerprint(saved.state)
                assert replace(checkpoint, state=None, earlier=()) == replace(
                    saved, state=None, earlier=()
                ), (path.name, place)
                assert [
                    fingerprint(version.state) for version in checkpoint.earlier
                ] == [fingerprint(state(1.0))]
        path.write_bytes(content)


def test_only_damaged_or_foreign_checkpoints_is_an_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    folder.save(1, state(1.0))
    with pytest.raises(CheckpointError, match="belongs to another experiment"):
        CheckpointFolder(tmp_path, "xyz").load_latest(ModelState)
    (tmp_path / "round-000001" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        folder.load_latest(ModelState)


def test_a_draft_that_a_kill_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".abc.draft").mkdir()
    folder = CheckpointFolder(tmp_path, "abc")
    assert folder.load_latest(ModelState) is None
    folder.save(1, state(1.0))
    manifest = json.loads((tmp_path / "round-000001" / "manifest.json").read_text())
    assert manifest["server_round"] == 1
    assert manifest["fingerprint"] == fingerprint(state(1.0))


@pytest.fixture
def log(tmp_path: Path) -> DistributionLog:
    return DistributionLog(tmp_path / "served.jsonl")


def served(*reported: ClientResult) -> dict[str, ClientResult]:
    return {result.client: result for result in reported}


def test_client_results_belong_to_a_model(log: DistributionLog) -> None:
    assert log.reported("m1") == {}
    log.append("m0", served(result("a", 0)))
    log.append("m1", served(result("a", 1), result("b", 2)))
    assert log.reported("m1") == {"a": result("a", 1), "b": result("b", 2)}
    log.append("m1", {"c": None})
    reported = log.reported("m1")
    assert (reported["c"], list(reported), len(reported)) == (None, ["a", "b", "c"], 3)
    assert ("c" in reported, "d" in reported) == (True, False)
    results = reported.of(["b", "c", "a"])
    assert list(results) == [result("b", 2), None, result("a", 1)]


def test_latest_report_of_a_client_counts(log: DistributionLog) -> None:
    log.append("m", {"a": None, "b": result("b", 1)})
    log.append("m", {"a": result("a", 2), "b": None})
    reported = log.reported("m")
    assert dict(reported) == {"a": result("a", 2), "b": None}
    assert list(reported.withheld) == ["b"]
    shown = ShownResults(reported, ["a", "b"], {"b": "zoe", "a": "adam"})
    assert list(shown) == [result("adam", 2)]


def test_shown_results_are_sorted_by_the_clients_titles(
    log: DistributionLog,
) -> None:
    log.append("m", served(result("a"), result("b"), result("c")))
    shown = ShownResults(log.reported("m"), ["a", "b"], {"a": "zoe"})
    assert [result.client for result in shown] == ["b", "zoe"]
    shown = ShownResults(log.reported("m"), ["a", "c"], {"a": "zoe", "c": "bob"})
    assert [result.client for result in shown] == ["bob", "zoe"]
    assert list(shown) == list(shown)


def test_weights_of_labels_are_kept(log: DistributionLog) -> None:
    plain = result("a")
    tested = dataclasses.replace(
        plain.personal, weight_sum=0.1 + 0.2, weight_correct=0.1
    )
    reported = dataclasses.replace(plain, personal=tested)
    log.append("m", served(reported))
    assert log.reported("m") == {"a": reported}


def test_results_from_before_there_were_weights_are_read(log: DistributionLog) -> None:
    document = dataclasses.asdict(result("a"))
    for which in ("personal", "reference", "validation"):
        del document[which]["weight_sum"], document[which]["weight_correct"]
    line = json.dumps({"model": "m", "result": document})
    log.path.write_text(f"{line}\n")
    assert log.reported("m") == {"a": result("a")}


def test_a_damaged_line_before_the_last_is_an_error(log: DistributionLog) -> None:
    path = log.path
    log.append("m", served(result("a")))
    path.write_bytes(b'{"model\n' + path.read_bytes())
    with pytest.raises(RunError, match=r"line 1 of .*served\.jsonl is damag"):
        log.reported("m")
    path.write_text(json.dumps({"model": "m", "result": {"client": 3}}) + "\n")
    with pytest.raises(RunError, match="is no client's result"):
        log.reported("m")


def test_a_run_that_is_led_is_not_overwritten(folder: RunFolder) -> None:
    folder.append_round({"server_round": 1})
    with folder.locked(), pytest.raises(RunError, match="another process is at work"):
        RunFolder.create(folder.path, EXPERIMENT, overwrite=True)
    assert folder.rounds() == [{"server_round": 1}]
    folder.require_idle()


def test_a_checkpoint_holds_what_it_cannot_go_on_without(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "test", 2)
    of = [
        Checkpoint(number, ModelState(torch.full((2,), float(number))), "")
        for number in range(6)
    ]
    folder.save(2, of[2].state)
    folder.save(4, of[4].state, None, [of[1], of[2]])
    folder.save(5, of[5].state, None, [of[1], of[4]])
    # One that is there by itself is no more than what others hold of it.
    assert folder.rounds() == [4, 5]

    def earlier() -> list[tuple[int, list[float]]]:
        loaded = CheckpointFolder(tmp_path, "test", 2).load_latest(ModelState)
        assert loaded is not None
        return [
            (version.server_round, version.state.weights.tolist())
            for version in loaded.earlier
        ]

    assert earlier() == [(1, [1.0, 1.0]), (4, [4.0, 4.0])]
    (tmp_path / "round-000005/earlier-000004.safetensors").unlink()
    assert earlier() == [(1, [1.0, 1.0]), (2, [2.0, 2.0])]
    (tmp_path / "round-000004/earlier-000001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        folder.load_latest(ModelState)


def test_a_model_that_clients_train_for_long_is_written_once(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "test")
    first = Checkpoint(1, ModelState(torch.zeros(2)), "")
    for server_round in (2, 3):
        folder.save(server_round, ModelState(torch.ones(2)), None, [first])
    files = [
        tmp_path / f"round-00000{number}/earlier-000001.safetensors"
        for number in (2, 3)
    ]
    assert files[0].samefile(files[1])
