"""The shortest run over a real client; the whole story is in `test_story`."""

import pytest

from tests.federation.small_federation import Found


@pytest.mark.integration
def test_a_client_trains_and_is_handed_the_model(found: Found) -> None:
    federation = found(clients=["0000"])
    federation.server()
    node = federation.client("0000")
    node.wait_for("in the federation of")
    submitted, run = federation.submit("training.num_rounds=1")
    assert submitted.wait() == 0
    assert list(run.clients) == ["0000"]
    assert (federation.client_folder("0000") / "state/serving.json").exists()
    assert node.stop() == 0
