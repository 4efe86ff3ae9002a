import math
from pathlib import Path

import pytest
import torch

from knnper.server.screening import (
    Change,
    Measured,
    Screening,
    exploded,
    median_loss,
    sign_of_explosion,
)
from knnper.strategies.core.records import ModelUpdate


def screening(folder: Path, *moved: float, sent: float = 3.0) -> Screening:
    """Return the screening of a round whose clients moved the weights so far."""
    made = Screening(None, {}, 1.0, {}, folder / "waiting")
    update = ModelUpdate(torch.zeros(1), 1, 0.5)
    updates = [Measured("a", update, {"weights": Change(m, sent)}) for m in moved]
    list(made.passed(updates, len(updates), lambda *_: None))
    return made


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], None),
        ([math.nan], None),
        ([math.nan, 0.3], 0.3),
        ([0.1, 1e99, 0.2], 0.2),
        ([0.1, math.inf, 1e101], math.inf),
        ([-5.0, -3.0], -5.0),
    ],
)
def test_one_client_does_not_move_the_median(
    losses: list[float], expected: float | None
) -> None:
    assert median_loss(losses) == expected


@pytest.mark.parametrize(
    ("loss", "lowest", "explodes"),
    [
        (2.3, None, False),
        (math.inf, None, True),
        (None, 0.4, False),
        (20.4, 0.4, False),  # 0.4 + 20
        (20.5, 0.4, True),
        (1.0, 1e-6, False),  # a client that nobody has learned from
        (105.0, 5.0, False),  # 5 + 20 * 5
        (105.1, 5.0, True),
        (8_000.0, -400.0, True),  # -400 + 20 * 400 = 7,600
        (7_000.0, -400.0, False),
        (math.inf, 0.4, True),
    ],
)
def test_how_far_a_loss_may_rise(
    tmp_path: Path, loss: float | None, lowest: float | None, explodes: bool
) -> None:
    found = sign_of_explosion(loss, lowest, screening(tmp_path, 0.1))
    assert bool(found) == explodes


@pytest.mark.parametrize(
    ("moved", "sent", "explodes"),
    [
        ((0.5, 9.0, 9.0), 3.0, True),  # 9 > 2 * (3 + 1)
        ((0.5, 7.9, 99.0), 3.0, False),
        ((0.5, 0.6, 1e9), 3.0, False),  # one client
        ((9.0, 9.0), 0.0, False),  # a loss is sent by nobody
    ],
)
def test_how_far_the_median_client_may_move(
    tmp_path: Path, moved: tuple[float, ...], sent: float, explodes: bool
) -> None:
    found = sign_of_explosion(0.5, 0.4, screening(tmp_path, *moved, sent=sent))
    assert ("weights" in found) == explodes


def test_the_last_good_round_is_named() -> None:
    assert "in rounds 5 to 7: too much" in str(exploded(7, "too much", 4))
    assert "in round 5: too much" in str(exploded(5, "too much", 4))
    assert "last good round is 4" in str(exploded(5, "too much", 4))
