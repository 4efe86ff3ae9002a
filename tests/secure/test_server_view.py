"""The server's view: all messages of an execution, and attacks that use them."""

import itertools

import numpy as np
import pytest
from scipy import stats

from knnper.secure import client
from knnper.secure.primitives import combine_shares, self_mask
from knnper.secure.quantization import Words
from knnper.secure.server import shares_needed
from tests.secure.protocol import Execution, updates_of, weights_of

SIZE = 20_000
# The probability that a correct mask exceeds a bound of the tests below.
RARE = 1e-9


def _executed(dropped: str = "") -> Execution:
    updates = {name: update * 0 for name, update in updates_of(5, SIZE).items()}
    execution = Execution(
        updates, weights_of(updates), dropped={"masked": [dropped] if dropped else []}
    )
    execution.total()
    return execution


def _require_uniform(words: Words) -> None:
    """Chi-square tests of all bytes, and of differences between neighbouring words."""
    for values in (words.view(np.uint8), np.diff(words).view(np.uint8)):
        counts = np.bincount(values, minlength=256)
        assert stats.chisquare(counts).pvalue > RARE


def test_masked_update_is_uniform_although_the_update_is_zero() -> None:
    execution = _executed()
    for masked in execution.masked.values():
        _require_uniform(masked)
    with pytest.raises(AssertionError):
        _require_uniform(execution.encoded["000"])


def test_sums_of_some_masked_updates_are_uniform() -> None:
    execution = _executed()
    for count in (2, 3, 4, 5):
        for names in itertools.combinations(sorted(execution.masked), count):
            _require_uniform(
                np.sum([execution.masked[name] for name in names], 0, np.uint32)
            )


def test_masked_update_stays_uniform_without_the_masks_that_the_server_learns() -> None:
    # It learns every survivor's self-mask secret, and the masking secret of the dropped
    # client. The masks of pairs of survivors remain.
    execution = _executed(dropped="004")
    for name in sorted(execution.unmask_requests):
        number = str(int(name) + 1)
        shares = {
            int(holder) + 1: revealed[number]
            for holder, revealed in execution.revealed.items()
        }
        needed = dict(itertools.islice(shares.items(), 3))
        secret = combine_shares(needed)
        assert secret == execution.states[name].self_mask
        rest = execution.masked[name] - self_mask(secret, SIZE)
        dropped, candidate = execution.states["004"], rest.copy()
        assert dropped.plan is not None
        client.add_pair_masks(
            candidate, dropped.masking, dropped.settings, dropped.plan, [number]
        )
        _require_uniform(candidate)


def test_server_gets_one_kind_of_share_of_each_client() -> None:
    # Not of the dropped client's self-mask secret either: its late update may arrive.
    execution = _executed(dropped="004")
    for holder, revealed in execution.revealed.items():
        held = execution.states[holder].held
        for number, share in revealed.items():
            is_dropped = number == "5"
            assert share == (held[number][32:] if is_dropped else held[number][:32])


def test_both_secrets_of_a_client_would_unmask_its_update() -> None:
    """The attack that the client's refusals prevent succeeds without them."""
    execution = _executed()
    victim = execution.states["000"]
    assert victim.plan is not None
    rest = execution.masked["000"] - self_mask(victim.self_mask, SIZE)
    plain = rest.copy()
    others = ["2", "3", "4", "5"]
    client.add_pair_masks(plain, victim.masking, victim.settings, victim.plan, others)
    np.testing.assert_array_equal(2 * rest - plain, execution.encoded["000"])


def test_shares_from_both_sides_do_not_reach_the_threshold() -> None:
    # The server lists the victim as dropped to some holders, and as a survivor to the
    # rest: at most one of the two kinds of share is enough for a secret.
    for size in range(3, 40):
        threshold = shares_needed(size, 0.1)
        for num_dropped in range(size + 1):
            kinds = (num_dropped, size - num_dropped)
            assert sum(count >= threshold for count in kinds) <= 1
