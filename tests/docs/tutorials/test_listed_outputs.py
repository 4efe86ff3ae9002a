import pytest

from tests.docs.tutorials.comparing import difference

WRITTEN = """progress
│ method │ average │ seconds │
│ FedAvg │ 72.6 %  │ 26.9    │
│ Local  │ 30.0 %  │ 1.0     │
sha256: 00ff

done
"""


@pytest.mark.parametrize(
    "shown",
    [
        "│ FedAvg │ 72.6 % │ 26.9 │\n",
        "│ FedAvg │ 70.1 % │ … │\n",
        "progress\n…\ndone\n",
        "sha256: …\n\ndone\n",
        "│ method │ average │ seconds │\n…\n│ Local  │ … │\n",
        "…\nprogress\n",
    ],
)
def test_what_is_shown_was_written(shown: str) -> None:
    assert difference(shown, WRITTEN) is None


@pytest.mark.parametrize(
    "shown",
    [
        "│ FedAvg │ 62.6 % │ … │\n",
        "│ FedAvg │ 72 % │ … │\n",
        "│ FedProx │ 72.6 % │ … │\n",
        "progress\ndone\n",
        "done\n…\nprogress\n",
        "prog\n",
        "sha256: 00fe\n",
    ],
)
def test_what_is_shown_was_not_written(shown: str) -> None:
    assert difference(shown, WRITTEN) is not None


def test_large_numbers_may_differ_by_a_twentieth() -> None:
    assert difference("took 1000.0 s\n", "took 1049.0 s\n") is None
    assert difference("took 1000.0 s\n", "took 1051.0 s\n") is not None


def test_shares_may_differ_by_a_twentieth() -> None:
    assert difference("0.9604\n", "0.9208\n") is None
    assert difference("0.9604\n", "0.9008\n") is not None


def test_the_place_with_the_right_numbers_is_found() -> None:
    assert difference("a 50.0\n", "a 1.0\na 50.0\n") is None
