"""Every private part of Flower that a node relies on."""

import inspect
import re

import flwr
from flwr.supernode import fleet_http_connection
from flwr.supernode import start_client_internal as main_loop
from flwr.supernode.runtime import run_clientapp


def test_the_version_is_the_one_that_was_read() -> None:
    assert flwr.__version__.startswith(("1.41.", "1.42."))


def test_the_main_loop_has_the_names_that_are_replaced() -> None:
    names = {"time", "pull_objects", "register_signal_handlers", "_init_connection"}
    assert names <= set(vars(main_loop))


def test_the_main_loop_sleeps_for_a_message_and_for_a_reply() -> None:
    source = inspect.getsource(main_loop)
    assert set(re.findall(r"time\.(\w+)\(", source)) == {"sleep"}
    assert sorted(re.findall(r"time\.sleep\((.*)\)", source)) == ["0.5", "0.5", "3"]


def test_the_main_loop_is_called_as_it_can_be() -> None:
    given = set(inspect.signature(main_loop.start_client_internal).parameters)
    assert given >= {
        *("state_factory", "server_address", "node_config", "root_certificates"),
        *("insecure", "authentication_keys", "isolation", "superexec_auth_secret"),
    }


def test_the_connection_has_the_names_that_are_replaced() -> None:
    names = {"flwr_exit", "os", "make_simple_http_retry_invoker"}
    assert names <= set(vars(fleet_http_connection))
    source = inspect.getsource(fleet_http_connection)
    assert set(re.findall(r"\bos\.(\w+)\(", source)) == {"kill", "getpid"}


def test_a_retry_can_be_changed() -> None:
    invoker = fleet_http_connection.__dict__["make_simple_http_retry_invoker"]()
    assert {"should_giveup", "wait_gen_factory"} <= set(vars(invoker))


def test_the_clients_side_is_made_of_the_same_pieces() -> None:
    pull = "pull_and_inflate_object_from_tree"
    names = {"pull_task_input", "push_message", "push_task_output", pull}
    assert names <= set(vars(run_clientapp))
    taken = inspect.signature(vars(run_clientapp)[pull]).parameters
    assert "initial_backoff" in taken
