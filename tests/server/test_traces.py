"""Measured devices: what files say, which client has which, and what is refused."""

import csv
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import ConfigError, DataError, RunError
from knnper.experiment import BufferedTiming, DeviceSettings, TrainingSettings
from knnper.experiment_file import load_experiment, results_identity
from knnper.seeding import RandomKey
from knnper.server.fleet import Devices
from knnper.server.observer import Observer
from knnper.server.traces import Device, Times, Traces, digests
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from tests.server.test_schedule import METHOD, run, schedule, state_of, steps
from tests.strategies.method_checks import document

KEY = RandomKey(0)
# As FedScale's two files have them.
CAPACITY = {"7": {"computation": 100.0, "communication": 8.0}}
BEHAVIOUR = {
    "3": {
        "duration": 40,
        "inactive": [15, 40],
        "finish_time": 50,
        "active": [10, 30],
        "model": "CPH1801",
    }
}


def written(path: Path, content: Any) -> str:
    """Write JSON, or the rows of a table, or text, to a file; return where it is."""
    if isinstance(content, str):
        path.write_text(content)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(content[0]))
            table.writeheader()
            table.writerows(content)
    else:
        path.write_text(json.dumps(content))
    return str(path)


def device_of(tmp_path: Path, row: dict[str, Any], suffix: str = ".json") -> Device:
    path = written(tmp_path / f"devices{suffix}", [row])
    return Traces(DeviceSettings(trace=path), KEY).device("a")


def devices_of(
    device_settings: DeviceSettings, key: RandomKey = KEY, size: int = 10
) -> Devices:
    sizes = dict.fromkeys("abcdefghij", size)
    return Devices(TrainingSettings(devices=device_settings), sizes, METHOD, key)


@pytest.mark.parametrize("suffix", [".json", ".csv"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"seconds_per_example": 0.5}, Device(0.5)),
        ({"examples_per_s": 4}, Device(0.25)),
        ({"computation": 100}, Device(0.3)),
        ({"bytes_down_per_s": 3, "bytes_up_per_s": 2}, Device(None, 3.0, 2.0)),
        ({"download_kbps": 8, "upload_kbps": 4}, Device(None, 1000.0, 500.0)),
        ({"communication": 8}, Device(None, 1000.0, 1000.0)),
        ({"upload_kbps": 4, "os": "x"}, Device(None, None, 500.0)),
    ],
)
def test_units(
    tmp_path: Path, row: dict[str, Any], expected: Device, suffix: str
) -> None:
    device = device_of(tmp_path, row, suffix)
    assert device.seconds_per_example == pytest.approx(expected.seconds_per_example)
    assert device.bytes_down_per_s == expected.bytes_down_per_s
    assert device.bytes_up_per_s == expected.bytes_up_per_s


def test_several_measurements_count_with_their_mean(tmp_path: Path) -> None:
    """As MobiPerf has them."""
    row = {"tcp_speed_results": [6, 10], "device_properties": {"rssi": 2}}
    assert device_of(tmp_path, row) == Device(None, 1000.0, 1000.0)


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_times_of_both_formats_are_the_same(tmp_path: Path, suffix: str) -> None:
    row: dict[str, Any] = dict(BEHAVIOUR["3"])
    if suffix == ".csv":
        row |= {"active": "10 30", "inactive": "15 40"}
    expected = Times(((10.0, 15.0), (30.0, 40.0)), 50.0)
    assert device_of(tmp_path, row, suffix).times == expected
    both = {**row, "active": [10, 20, 30], "inactive": [15, 20, 40]}
    assert device_of(tmp_path, both).times == expected  # what is empty is nothing
    ends = list(itertools.islice(expected.ends(), 9))
    assert ends == [0, 10, 15, 30, 40, 60, 65, 80, 90]


def test_fedscales_files_by_hand(tmp_path: Path) -> None:
    """10 examples of 0.3 s, 32 bytes down and 8 up at 1000 a second: 3.04 s."""
    both = DeviceSettings(
        trace=written(tmp_path / "capacity.json", CAPACITY),
        availability_trace=written(tmp_path / "behaviour.json", BEHAVIOUR),
    )
    devices = devices_of(both)
    assert devices.work_s("a") == pytest.approx(3.04)
    intervals = [
        at_s for at_s in range(0, 101, 5) if devices.is_available("a", float(at_s))
    ]
    assert intervals == [10, 30, 35, 60, 80, 85]
    assert devices.back_s("a", 0.0) == 10
    assert devices.back_s("a", 41.0) == 60
    assert devices.finished_s("a", 0.0) == pytest.approx(13.04)
    # Two seconds are done at 15, the others from 30 on.
    assert devices.finished_s("a", 13.0) == pytest.approx(31.04)
    # Of 9 s: 5 from 60 on, and 4 from 80 on.
    longer = devices_of(DeviceSettings(examples_per_s=1, **_times(both)), size=9)
    assert longer.finished_s("a", 45.0) == pytest.approx(84.0)


def _times(settings: DeviceSettings) -> dict[str, Any]:
    return {"availability_trace": settings.availability_trace}


def test_fields_that_a_trace_lacks_come_from_the_settings(tmp_path: Path) -> None:
    path = written(tmp_path / "links.csv", [{"download_kbps": 0.008}])
    device_settings = DeviceSettings(trace=path, examples_per_s=5, bytes_up_per_s=2)
    # 10 examples at 5 a second, 32 bytes at one a second, 8 bytes at two a second.
    assert devices_of(device_settings).work_s("a") == 2 + 32 + 4


def test_a_device_that_is_always_there(tmp_path: Path) -> None:
    row = {"active": [0], "inactive": [24], "finish_time": 24}
    path = written(tmp_path / "always.json", [row])
    devices = devices_of(DeviceSettings(trace=path, examples_per_s=1))
    assert all(devices.is_available("a", at_s) for at_s in (0.0, 23.9, 24.0, 100.0))
    assert devices.finished_s("a", 20.0) == 30


def test_device_of_a_client_does_not_depend_on_the_others(tmp_path: Path) -> None:
    rows = [{"seconds_per_example": 1 + number} for number in range(5)]
    settings = DeviceSettings(trace=written(tmp_path / "five.csv", rows))
    clients = [f"{number:04d}" for number in range(2000)]
    drawn = [Traces(settings, KEY).device(client) for client in clients[:20]]
    again = [Traces(settings, KEY).device(client) for client in reversed(clients[:20])]
    assert drawn == again[::-1]
    assert drawn != [
        Traces(settings, RandomKey(1)).device(client) for client in clients[:20]
    ]
    traces = Traces(settings, KEY)
    counts = Counter(traces.device(client).seconds_per_example for client in clients)
    assert len(counts) == 5
    assert all(count == pytest.approx(400, abs=60) for count in counts.values())


def test_steps_by_hand(tmp_path: Path) -> None:
    """One device for all, there for 3 s of 10: a's 1 s, b's 2 s and c's 4 s."""
    row = {
        "examples_per_s": 1,
        "active": [2],
        "inactive": [5],
        "finish_time": 10,
    }
    devices = DeviceSettings(trace=written(tmp_path / "one.json", [row]))
    planned = schedule(BufferedTiming(buffer_size=1), devices=devices)
    # All begin at 2. At 5 b has done one second of two, c three of four.
    assert steps(planned, 7) == [
        ({"a": 0}, 3.0),
        ({"a": 1}, 4.0),
        ({"b": 0}, 4.0),
        ({"a": 2}, 5.0),
        ({"a": 4}, 13.0),
        ({"b": 3}, 13.0),
        ({"c": 0}, 13.0),
    ]


PICKLE = b"\x80\x04}\x94."  # of an empty mapping


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", r"found no device"),
        ("os,seconds\nx,1\n", r"found os, seconds of a device, expected some of sec"),
        ("computation\n-1\n", r'device 1: computation: found "-1", expected a posit'),
        ("computation\nfast\n", r'device 1: computation: found "fast", expected numb'),
        ("computation,examples_per_s\n1,2\n", r"found examples_per_s and computation,"),
        (
            "active\n3\n",
            r"device 1: found active, expected inactive and finish_time wi",
        ),
        ("active,inactive,finish_time\n5,3,9\n", r"expected active\[0\], inactive\[0"),
        ("active,inactive,finish_time\n1 4,3,9\n", r'found active "1 4", inactive "3"'),
        ("active,inactive,finish_time\n1,1,9\n", r"leave the device out, or correct i"),
        ("active,inactive,finish_time\n1,12,9\n", r"and finish_time \"9\", expected"),
        ("computation,upload_kbps\n1,2\n1,\n", r"device 1 has .*up_per_s, device 2"),
        ('{"7": 3}', r"device 7: found 3, expected a mapping such as"),
        ('{"7": ', r"cannot be read: .*expected UTF-8 text, CSV with a head or JSON"),
        ('[{"tcp_speed_results": []}]', r"found \[\], expected a positive number; lea"),
        (
            "examples_per_s\n5,7\n",
            r"device 1: found 2 cells, expected the 1 of the h",
        ),
        ("examples_per_s\n1e-320\n", r'found "1e-320", expected a positive number'),
        (f'[{{"examples_per_s": 1{"0" * 400}}}]', r"examples_per_s: found 1000"),
        ("[" * 100_000, r"cannot be read: .*expected UTF-8 text"),
    ],
)
def test_invalid_trace_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = written(tmp_path / "devices.csv", content)
    with pytest.raises(DataError, match=rf"devices\.csv.*{problem}"):
        Traces(DeviceSettings(trace=path), KEY)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    path = tmp_path / "client_device_capacity"
    path.write_bytes(PICKLE)
    with pytest.raises(DataError, match=r"found a pickle, which could run anything"):
        Traces(DeviceSettings(trace=str(path)), KEY)
    with pytest.raises(DataError, match=r"devices\.trace: .*none\.csv cannot be read"):
        Traces(DeviceSettings(trace=str(tmp_path / "none.csv")), KEY)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"speed_spread": 3.0},
            r"speed_spread: found 3\.0 beside a file that",
        ),
        ({"link_spread": 3.0}, r"link_spread: found 3\.0"),
        ({"available": 0.5, "availability_trace": "behaviour.json"}, "available: f"),
        ({"availability_trace": "capacity.json"}, "found a file without them; give it"),
    ],
)
def test_settings_that_repeat_the_trace_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "capacity.json", CAPACITY)
    written(tmp_path / "behaviour.json", BEHAVIOUR)
    with pytest.raises(DataError, match=problem):
        Traces(DeviceSettings(trace="capacity.json", **settings), KEY)


def test_runs_without_files_stay_the_runs_that_they_are(tmp_path: Path) -> None:
    def identity(**devices: Any) -> str:
        values = document("fedavg", training={"devices": devices})
        return results_identity(load_experiment(values, experiment_catalogue()))

    assert identity(trace=None) == identity()
    assert identity(trace="devices.csv") != identity()
    with pytest.raises(ConfigError, match=r"training\.devices\.trac: .*trace"):
        identity(trac="devices.csv")


def test_a_run_goes_on_with_the_same_file_alone(tmp_path: Path) -> None:
    rows = [{"examples_per_s": speed} for speed in (1, 10, 100)]
    path = written(tmp_path / "devices.csv", rows)
    late = {
        "num_rounds": 4,
        "devices": {"trace": path},
        "timing": {"name": "buffered", "buffer_size": 1},
    }
    whole = run(tmp_path, "whole", **late)
    again = run(tmp_path, "again", **late)
    assert again.manifest()["traces"] == digests(DeviceSettings(trace=path))
    again.go_back(2)
    chosen = again.experiment(experiment_catalogue())
    written(Path(path), rows[:2])
    with pytest.raises(RunError, match=r"devices\.csv has changed since the run"):
        simulate(open_workbench(chosen), again, Observer(), ["test"])
    written(Path(path), rows)
    simulate(open_workbench(chosen), again, Observer(), ["test"])
    assert state_of(again) == state_of(whole)
