"""What is written down of Flower's protocol and settings is what Flower has."""

import inspect
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, RecordDict
from flwr.common import constant
from flwr.common.constant import ErrorCode, SType
from flwr.supercore import constant as numbers
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.primitives import asymmetric
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.grid import http_grid

from knnper.client.flower_node import (
    FIRST_RETRY_S,
    quick_pulls,
)
from knnper.transport import flower_protocol as ours
from knnper.transport import messages
from tests.fresh_process import run_fresh


def test_nodes_may_ask_what_flower_lets_them() -> None:
    fleet = {
        path: kind
        for (method, path), kind in PROTOBUF_REQUEST_TYPES.items()
        if path.startswith(ours.FLEET) and method == "POST"
    }
    assert fleet == ours.REQUESTS
    assert ("POST", ours.ACQUIRE_TASK) in PROTOBUF_REQUEST_TYPES


@pytest.mark.parametrize(
    ("written", "flowers"),
    [
        (ours.PROTOBUF, PROTOBUF_MEDIA_TYPE),
        (ours.PUBLIC_KEY, numbers.FLEET_HTTP_PUBLIC_KEY_HEADER),
        (ours.SIGNATURE, numbers.FLEET_HTTP_SIGNATURE_HEADER),
        (ours.TIMESTAMP, constant.TIMESTAMP_HEADER),
        (ours.AHEAD_S, constant.SYSTEM_TIME_TOLERANCE),
        (ours.AGO_S, constant.TIMESTAMP_TOLERANCE),
        (ours.TTL_TOLERANCE_S, constant.MESSAGE_TTL_TOLERANCE),
        (ours.SUPERLINK, constant.SUPERLINK_NODE_ID),
        (ours.SERVER_APP, numbers.TaskType.SERVER_APP),
        (ours.SERVER_APP, numbers.TASK_TYPE_TO_COMMAND[numbers.TaskType.SERVER_APP]),
        (ours.FORBIDDEN, ApiErrorCode.FORBIDDEN_ACTION),
        (ours.UNREADABLE, ApiErrorCode.INVALID_PROTOBUF_PAYLOAD),
        (ours.KEY_NEEDED, ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED),
        (ours.BAD_HEARTBEAT, ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL),
        (ours.NOT_ACCEPTED, ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED),
        (ours.UNKNOWN_ERROR, ErrorCode.UNKNOWN),
        (ours.APP_FAILED, ErrorCode.CLIENT_APP_RAISED_EXCEPTION),
        (ours.MESSAGE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE),
        (messages._NUMPY, SType.NUMPY),
    ],
)
def test_a_number_or_name_is_flowers(written: object, flowers: object) -> None:
    assert written == flowers


def test_keys_and_signatures_are_flowers() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    pem = ours.public_pem(key.public_key())
    assert pem == asymmetric.public_key_to_bytes(key.public_key())
    assert ours.read_public_key(pem) == key.public_key()
    signed = asymmetric.sign_message(key, b"text")
    assert ours.is_signature(key.public_key(), b"text", signed)
    assert not ours.is_signature(key.public_key(), b"other", signed)
    other = key.sign(b"text", ec.ECDSA(hashes.SHA384()))
    assert not ours.is_signature(key.public_key(), b"text", other)


def test_a_key_on_another_curve_is_none() -> None:
    key = ec.generate_private_key(ec.SECP256K1()).public_key()
    assert not asymmetric.uses_nist_ec_curve(key)
    assert ours.read_public_key(ours.public_pem(key)) is None
    assert ours.read_public_key(b"none") is None


def test_an_objects_head_is_read_and_written_as_flower_does() -> None:
    leaf = ConfigRecord({"a": 1}).deflate()
    assert ours.leaf("ConfigRecord", ours.body_of(leaf)) == leaf
    node = RecordDict({"b": ConfigRecord({"a": 1})}).deflate()
    for content in (leaf, node):
        head = get_object_head_values_from_object_content(content)
        assert ours.head_of(content) == head


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"code": 7, "detail": "no", "extra": "x"}', (7, "no", "x")),
        ('{"code": 7, "detail": "no"}', (7, "no", "")),
        ('{"code": null, "detail": "no"}', (0, '{"code": null, "detail": "no"}', "")),
        ("[]", (0, "[]", "")),
        ("no JSON", (0, "no JSON", "")),
    ],
)
def test_an_error_in_an_answer(body: str, expected: tuple[int, str, str]) -> None:
    found = ours.FlowerError.of(body)
    assert (found.code, found.detail, found.extra) == expected


def test_arrays_on_their_way_are_asked_for_sooner() -> None:
    grid = vars(http_grid)
    assert grid["pull_objects"] is pull_objects
    slow = inspect.signature(pull_objects).parameters["initial_backoff"].default
    with quick_pulls():
        quick = inspect.signature(grid["pull_objects"]).parameters["initial_backoff"]
        assert quick.default == FIRST_RETRY_S < slow
    assert grid["pull_objects"] is pull_objects
    assert "pull_objects(" in inspect.getsource(http_grid.HttpGrid), "it uses it"


@pytest.mark.parametrize(
    "module",
    [
        *(
            "knnper.cli.app",
            "knnper.cli.flower_apps",
            "knnper.simulation.flower_engine",
        ),
        *("knnper.server.flower_federation", "knnper.client.flower_node"),
    ],
)
def test_flower_reports_nothing(module: str, tmp_path: Path) -> None:
    code = (
        # The tests' own process has it switched off by now, and hands that on.
        "import os; os.environ.pop('FLWR_TELEMETRY_ENABLED', None);"
        f"import {module}; from flwr.supercore import telemetry;"
        "assert telemetry.FLWR_TELEMETRY_ENABLED == '0'"
    )
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_keeps_environment_variables_of_the_user(tmp_path: Path) -> None:
    code = (
        "import os; os.environ['FLWR_TELEMETRY_ENABLED'] = '1';"
        "import knnper; from flwr.supercore import telemetry;"
        "assert telemetry.FLWR_TELEMETRY_ENABLED == '1';"
        "assert os.environ['FLWR_DISABLE_UPDATE_CHECK'] == '1'"
    )
    result = run_fresh(code, tmp_path)
    assert result.returncode == 0, result.stderr
