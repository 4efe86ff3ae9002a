import inspect

from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid

from knnper.client.flower_node import FIRST_RETRY_S, quick_pulls


def test_arrays_on_their_way_are_asked_for_sooner() -> None:
    grid = vars(http_grid)
    assert grid["pull_objects"] is pull_objects
    slow = inspect.signature(pull_objects).parameters["initial_backoff"].default
    with quick_pulls():
        quick = inspect.signature(grid["pull_objects"]).parameters["initial_backoff"]
        assert quick.default == FIRST_RETRY_S < slow
    assert grid["pull_objects"] is pull_objects
    assert "pull_objects(" in inspect.getsource(http_grid.HttpGrid), "it uses it"
