import pytest
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import RunNotRunningException

from knnper.client import flower_node as flower_supernode
from knnper.errors import RunError


def test_a_run_that_ends_while_a_message_is_received_is_a_plain_error() -> None:
    def pull(object_id: str) -> bytes:
        raise RunNotRunningException

    with pytest.raises(RunError, match="the run has ended meanwhile"):
        flower_supernode._tidied_up(pull_objects)(["an object"], pull_object_fn=pull)
