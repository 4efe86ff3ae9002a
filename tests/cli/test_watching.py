import threading
from pathlib import Path

from knnper.server.observer import Observer, RoundRecord
from knnper.server.run_folder import RunFolder
from knnper_cli.watching import Watch
from tests.apps.site_grid import experiment


class Told(Observer):
    def __init__(self) -> None:
        self.started: tuple[int, int] | None = None
        self.rounds: list[int | float] = []

    def training_started(self, num_rounds: int, first_round: int) -> None:
        self.started = num_rounds, first_round

    def round_finished(self, record: RoundRecord) -> None:
        assert isinstance(record["train_loss"], float)
        self.rounds.append(record["server_round"])


def a_round(number: int) -> RoundRecord:
    return {"server_round": number, "train_loss": float("nan"), "num_clients": 3}


def test_a_run_is_followed_to_its_results(tmp_path: Path) -> None:
    watch, told = Watch(tmp_path / "run", print), Told()

    def run() -> None:
        folder = RunFolder.create(tmp_path / "run", experiment())
        for number in (1, 2):
            looked.wait(10)
            looked.clear()
            folder.append_round(a_round(number))
        folder.write_results({})

    looked = threading.Event()

    def has_ended() -> bool:
        looked.set()
        return False

    thread = threading.Thread(target=run)
    thread.start()
    assert watch.until_done(told, has_ended)
    thread.join()
    assert told.started is not None
    assert told.started == (2, 1)
    assert told.rounds == [1, 2]


def test_results_from_before_do_not_count(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment())
    folder.append_round(a_round(1))
    folder.write_results({})
    told = Told()
    assert not Watch(folder.path, print).until_done(told, lambda: True)
    assert told.started == (2, 2)
    watch = Watch(folder.path, print)
    folder.write_results({"again": True})
    assert watch.until_done(told, lambda: True)


def test_a_run_that_never_began_has_ended(tmp_path: Path) -> None:
    assert not Watch(tmp_path / "nowhere", print).until_done(Told(), lambda: True)


def test_a_run_that_takes_the_place_of_another_is_followed_from_its_beginning(
    tmp_path: Path,
) -> None:
    before = RunFolder.create(tmp_path / "run", experiment())
    before.append_round(a_round(1))
    before.write_results({})
    watch, told, looks = Watch(before.path, print), Told(), 0

    def has_ended() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            RunFolder.create(before.path, experiment(), overwrite=True)
        if looks == 2:
            before.append_round(a_round(1))
        return looks == 3

    assert not watch.until_done(told, has_ended), "it has no results of its own"
    assert told.started == (2, 1)
    assert told.rounds == [1]
