"""SecAgg+ as state machines: the sum, drop-outs, and refusals of both sides."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from knnper.privacy_settings import PairwiseSettings, SecAggPlusSettings
from knnper.secure import client
from knnper.secure.client import ClientState
from knnper.secure.messages import (
    KeysRequest,
    MaskRequest,
    PublicKeys,
    RoundPlan,
    SecureAggregationError,
    UnmaskRequest,
)
from knnper.secure.primitives import combine_shares, split_secret
from knnper.secure.quantization import Quantizer
from knnper.secure.server import (
    SecureSum,
    TooFewClientsError,
    random_groups,
    shares_needed,
)
from tests.secure.protocol import (
    EXECUTION,
    QUANTIZER,
    STAGES,
    Execution,
    updates_of,
    weights_of,
)

NUM_CLIENTS = (3, 4, 10, 100)
SPARSE = SecAggPlusSettings(neighbors=10, threshold=0.55)


def _require_sum(execution: Execution) -> None:
    """The sum is that of the encoded updates bit for bit, and of the updates nearly."""
    total = execution.total()
    names = sorted(execution.unmask_requests)
    expected = np.zeros_like(total)
    for name in names:
        expected += execution.encoded[name]
    np.testing.assert_array_equal(total, expected)
    largest = max(execution.weights.values())
    shares = {name: execution.weights[name] / largest for name in names}
    plain = sum(shares[name] * execution.updates[name].astype(float) for name in names)
    decoded = QUANTIZER.decode(total, sum(shares.values()))
    assert np.abs(decoded - plain).max() <= len(names) / (2**15 - 1)


@pytest.mark.parametrize("count", NUM_CLIENTS)
def test_sum_is_that_of_the_updates(count: int) -> None:
    updates = updates_of(count)
    _require_sum(Execution(updates, weights_of(updates), SPARSE))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [5, 10, 34])
def test_sum_is_that_of_the_survivors_after_drop_outs(count: int, stage: str) -> None:
    updates = updates_of(count)
    dropped = sorted(updates)[::7]
    weights = weights_of(updates)
    execution = Execution(updates, weights, SPARSE, dropped={stage: dropped})
    _require_sum(execution)
    in_sum = set(execution.unmask_requests)
    is_in_sum = stage == "unmask"
    assert in_sum == (set(updates) if is_in_sum else set(updates) - set(dropped))


def test_sum_after_drop_outs_at_each_stage_of_one_execution() -> None:
    updates = updates_of(100)
    names = sorted(updates)
    dropped = {stage: names[place::20] for place, stage in enumerate(STAGES)}
    execution = Execution(updates, weights_of(updates), SPARSE, dropped=dropped)
    _require_sum(execution)
    left_out = {name for stage in STAGES[:3] for name in dropped[stage]}
    assert sorted(execution.unmask_requests) == sorted(set(names) - left_out)


def test_sum_without_a_group_that_drops_out_as_a_whole() -> None:
    """Nobody holds the shares of clients 1 and 2 of the circle, and no mask is left."""
    updates = updates_of(10)
    numbers = [str(number) for number in range(1, 11)]
    circle = random_groups(numbers, 2, np.random.default_rng(0))
    names = [f"{int(number) - 1:03}" for number in circle]
    dropped = {"shares": [names[0], names[3]], "masked": names[1:3]}
    settings = SecAggPlusSettings(neighbors=2)
    execution = Execution(updates, weights_of(updates), settings, dropped)
    _require_sum(execution)
    assert set(execution.unmask_requests) == set(names[4:])


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_unmasked_below_the_threshold(stage: str) -> None:
    updates = updates_of(10)
    execution = Execution(
        updates, weights_of(updates), dropped={stage: sorted(updates)[:5]}
    )
    if stage in ("keys", "shares"):  # the rest is a smaller group
        execution.dropped = {stage: sorted(updates)[:8]}
    with pytest.raises(TooFewClientsError, match="nothing was learned"):
        execution.total()
    if stage != "unmask":
        assert not execution.revealed


def test_three_clients_tolerate_no_drop_out_after_the_shares() -> None:
    updates = updates_of(3)
    execution = Execution(updates, weights_of(updates), dropped={"masked": ["000"]})
    with pytest.raises(TooFewClientsError):
        execution.total()


def test_graph_is_symmetric_and_has_k_neighbors() -> None:
    numbers = [str(number) for number in range(1, 101)]
    groups = random_groups(numbers, 20, np.random.default_rng(3))
    for number, group in groups.items():
        assert len(set(group)) == 21
        assert all(number in groups[peer] for peer in group)
    small = random_groups(numbers[:21], 20, np.random.default_rng(3))
    assert all(set(group) == set(numbers[:21]) for group in small.values())


@pytest.mark.parametrize(
    ("size", "threshold", "expected"),
    [(3, 0.6, 2), (5, 0.6, 3), (5, 0.1, 3), (33, 0.6, 20), (4, 1.0, 4)],
)
def test_threshold_is_more_than_half(
    size: int, threshold: float, expected: int
) -> None:
    assert shares_needed(size, threshold) == expected


def test_shares_below_the_threshold_do_not_give_the_secret() -> None:
    secret = bytes(range(16)).hex()
    shares = split_secret(secret, 3, ["1", "2", "3", "4"])
    by_place = {int(holder): share for holder, share in shares.items()}
    assert combine_shares({place: by_place[place] for place in (1, 3, 4)}) == secret
    assert combine_shares({place: by_place[place] for place in (1, 3)}) != secret


def test_quantized_values_by_hand() -> None:
    quantizer = Quantizer(clip_range=2.0, bits=3)  # integers from -3 to 3
    rng = np.random.default_rng(0)
    values = np.array([-9.0, -2.0, 0.0, 2.0, 9.0], np.float32)
    encoded = quantizer.encode(values, 1.0, rng)
    assert encoded.view(np.int32).tolist() == [-3, -3, 0, 3, 3]
    decoded = quantizer.decode(encoded, 1.0)
    assert decoded.tolist() == [-2.0, -2.0, 0.0, 2.0, 2.0]
    halves = quantizer.encode(np.full(4000, 1.0, np.float32), 1.0, rng)  # 1.5 levels
    assert set(halves.tolist()) == {1, 2}
    assert abs(halves.mean() - 1.5) < 0.05


def test_sum_beyond_all_summands_is_refused() -> None:
    random = np.random.default_rng(1).integers(0, 2**32, 100, dtype=np.uint32)
    with pytest.raises(SecureAggregationError, match="damaged"):
        QUANTIZER.decode(random, 3.0)


@contextlib.contextmanager
def _refused(change: str) -> Iterator[None]:
    try:
        yield
    except SecureAggregationError:
        return
    pytest.fail(f"accepted: {change}")


def _with_another_end(sealed: str) -> str:
    """``sealed`` with the last of its hexadecimal digits changed."""
    return sealed[:-1] + f"{int(sealed[-1], 16) ^ 1:x}"


def _begun(stage: str) -> Execution:
    """An execution of five clients just before the server's request of ``stage``."""
    updates = updates_of(5)
    execution = Execution(updates, weights_of(updates))
    execution.exchange_keys()
    if stage in ("masked", "unmask"):
        execution.exchange_shares()
    if stage == "unmask":
        execution.send_masked()
    return execution


def _change_peer(plan: RoundPlan, number: str, **changes: object) -> RoundPlan:
    peer = dataclasses.replace(plan.peers[number], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, peers={**plan.peers, number: peer})


def _wrong_plans(plan: RoundPlan) -> dict[str, RoundPlan]:
    replace = dataclasses.replace
    peers = dict(plan.peers)
    of_two: dict[str, PublicKeys] = {number: peers[number] for number in ("1", "2")}
    without_own = {number: peers[number] for number in ("2", "3", "4")}
    return {
        "another execution": replace(plan, execution="execution-2"),
        "own key missing": replace(plan, peers=without_own),
        "own key replaced": _change_peer(plan, "1", masking=peers["2"].encryption),
        "duplicated key": _change_peer(plan, "3", masking=peers["2"].masking),
        "client without a number": replace(plan, peers={**peers, "x": peers["2"]}),
        "two clients": replace(plan, peers=of_two, threshold=2),
        "half as threshold": replace(plan, threshold=2),
        "threshold too large": replace(plan, threshold=6),
        "no hexadecimal key": _change_peer(plan, "2", encryption="key"),
        "key of small order": _change_peer(plan, "2", encryption="00" * 32),
    }


def test_client_refuses_wrong_plans() -> None:
    execution = _begun("shares")
    plan = execution.server.plans()["000"]
    state = execution.states["000"]
    client.share_secrets(state, plan)
    for change, wrong in _wrong_plans(plan).items():
        with _refused(change):
            client.share_secrets(state, wrong)


def test_weight_is_that_of_the_plan_and_no_more_than_the_examples() -> None:
    plan = _begun("shares").server.plans()["001"]  # 17 of at most 38 examples
    assert client.relative_weight(plan, 20) == 17 / 38
    with pytest.raises(SecureAggregationError, match="16 examples"):
        client.relative_weight(plan, 16)
    for weight in (0, 39):
        with pytest.raises(SecureAggregationError, match="at most 38"):
            client.relative_weight(dataclasses.replace(plan, weight=weight), 50)


def test_client_refuses_wrong_mask_requests() -> None:
    execution = _begun("masked")
    request = execution.server.mask_requests()["000"]
    state = execution.states["000"]
    values = np.zeros(5, np.uint32)
    sealed = request.sealed
    wrong_requests = {
        "another execution": dataclasses.replace(request, execution="execution-2"),
        "shares of too few": MaskRequest(request.execution, {"2": sealed["2"]}),
        "shares of a stranger": MaskRequest(
            request.execution, {**sealed, "9": sealed["2"]}
        ),
        "swapped shares": MaskRequest(
            request.execution, {**sealed, "2": sealed["3"], "3": sealed["2"]}
        ),
        "changed share": MaskRequest(
            request.execution, {**sealed, "2": _with_another_end(sealed["2"])}
        ),
    }
    masked_state, _ = client.mask(state, request, values)
    for change, wrong in wrong_requests.items():
        with _refused(change):
            client.mask(state, wrong, values)
    with pytest.raises(SecureAggregationError, match="stage"):
        client.mask(masked_state, request, values)


def test_client_refuses_wrong_unmask_requests() -> None:
    execution = _begun("unmask")
    request = execution.server.unmask_requests(execution.masked)["000"]
    state = execution.states["000"]
    replace = dataclasses.replace
    everyone = request.survivors
    wrong_requests = {
        "another execution": replace(request, execution="execution-2"),
        "itself as dropped": replace(request, survivors=everyone[1:]),
        "too few survivors": replace(request, survivors=everyone[:2]),
        "a stranger": replace(request, survivors=(*everyone, "9")),
    }
    for change, wrong in wrong_requests.items():
        with _refused(change):
            client.unmask(state, wrong)
    final_state, revealed = client.unmask(state, request)
    assert final_state == ClientState(final_state.sums)
    with pytest.raises(SecureAggregationError, match="stage"):
        client.unmask(final_state, request)
    of_masks = {number: share[:32] for number, share in state.held.items()}
    assert revealed == of_masks


def test_client_reveals_one_kind_of_share_of_each_client() -> None:
    execution = _begun("unmask")
    request = execution.server.unmask_requests(execution.masked)["000"]
    state = execution.states["000"]
    fewer = dataclasses.replace(request, survivors=request.survivors[:3])
    _, revealed = client.unmask(state, fewer)
    held = state.held
    assert revealed == {
        **{number: held[number][:32] for number in ("1", "2", "3")},
        **{number: held[number][32:] for number in ("4", "5")},
    }


def test_unmask_before_masking_is_refused() -> None:
    execution = _begun("masked")
    with pytest.raises(SecureAggregationError, match="stage"):
        client.unmask(
            execution.states["000"],
            UnmaskRequest(EXECUTION, ("1", "2", "3", "4", "5")),
        )


def test_neighbors_with_different_scales_give_no_sum() -> None:
    updates = updates_of(3)
    execution = Execution(updates, weights_of(updates))
    execution.exchange_keys()
    plans = execution.server.plans()
    plans["000"] = dataclasses.replace(plans["000"], largest_weight=100)
    for name, plan in plans.items():
        state, shares = client.share_secrets(execution.states[name], plan)
        execution.states[name] = state
        execution.server.add_shares(name, shares)
    with pytest.raises(SecureAggregationError, match="did not seal"):
        execution.send_masked()


def test_server_refuses_a_changed_masking_key() -> None:
    execution = _begun("shares")
    execution.dropped = {"masked": ["004"]}
    execution.exchange_shares()
    execution.send_masked()
    execution.reveal()
    revealed = execution.revealed["000"]
    changed = f"{int(revealed['5'], 16) ^ 1:032x}"
    execution.server.add_revealed("000", {**revealed, "5": changed})
    with pytest.raises(SecureAggregationError, match="do not give its key"):
        execution.server.unmasked(np.zeros(50, np.uint32))


def test_server_ignores_a_client_that_reveals_other_shares() -> None:
    execution = _begun("unmask")
    execution.reveal()
    revealed = execution.revealed["000"]
    rest = dict(list(revealed.items())[1:])
    for wrong in (rest, {**rest, "1": "00"}, {**rest, "1": "x" * 32}):
        with pytest.raises(SecureAggregationError):
            execution.server.add_revealed("000", wrong)


def test_pairwise_masks_cancel_in_each_round_of_one_key_agreement() -> None:
    settings = PairwiseSettings()
    states, keys = {}, {}
    for name in ("a", "b", "c", "d"):
        states[name], keys[name] = client.make_keys(
            ClientState(), KeysRequest("keys"), repr(settings)
        )
    weights = dict.fromkeys(keys, 3)
    values = np.arange(40, dtype=np.uint32)
    seen = []
    for attempt in (1, 2, 3):
        rng = np.random.default_rng(0)
        execution = SecureSum("keys", weights, settings, 1, rng, attempt)
        for name in keys:
            execution.add_keys(name, keys[name])
        plans = execution.plans()
        total = np.zeros(40, np.uint32)
        for name, plan in plans.items():
            before = states[name]
            states[name], masked = client.mask_pairwise(before, plan, values)
            with pytest.raises(SecureAggregationError, match="attempt"):
                client.mask_pairwise(states[name], plan, values)
            seen.append(masked.tobytes())
            total += masked
        np.testing.assert_array_equal(total, len(plans) * values)
        if attempt == 2:  # a site is missing from now on
            del keys["d"]
    assert len(set(seen)) == len(seen) == 11


def test_another_set_of_as_many_clients_is_noticed() -> None:
    def executed(*names: str) -> Execution:
        updates = {name: updates_of(5)["000"] for name in names}
        execution = Execution(updates, weights_of(updates))
        execution.total()
        return execution

    sums = executed("000", "001", "002").final_states["000"].sums
    for names in (("000", "001", "002"), ("000", "001", "003")):
        again = executed(*names)
        state = dataclasses.replace(again.states["000"], sums=sums)
        request = again.unmask_requests["000"]
        if names[2] == "002":
            assert client.unmask(state, request)[0].sums == sums
        else:
            with pytest.raises(SecureAggregationError, match="summed before"):
                client.unmask(state, request)
