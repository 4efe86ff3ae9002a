import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from knnper.client.site_runtime import MetricsPolicy
from knnper.errors import CodecError, RunError, TrainingDivergedError
from knnper.experiment import TrainingSettings
from knnper.experiment_file import load_experiment
from knnper.records import flatten, take_apart, unflatten
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.settings import Choice
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.compression import (
    COMPRESSORS,
    Compressed,
    CompressedUpdate,
    Compressor,
    Quantize,
    QuantizeSettings,
    Sign,
    TopK,
    TopKSettings,
)
from knnper.strategies.core.method import NoSettings, changed
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.strategies.fedavg import FedAvg
from tests.strategies.method_checks import document, refused
from tests.strategies.test_contract import CLIENTS, TRAINING, build, client_update
from tests.strategies.tiny import linear_task, noisy, task_for, white

KEY = RandomKey(1)


def array(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def there_and_back(
    compressor: Compressor, values: NDArray[np.float32], key: RandomKey = KEY
) -> NDArray[np.float32]:
    return compressor.decode(compressor.encode(values, key), len(values))


def test_top_k_sends_the_largest_with_their_places() -> None:
    compressor = TopK(TopKSettings(fraction=0.5))
    code = compressor.encode(array(0.5, -3.0, 2.0, 0.25, -2.0, 0.0), KEY)
    assert code == array(1, 2, 4).astype("<i4").tobytes() + array(-3, 2, -2).tobytes()
    assert compressor.decode(code, 6).tolist() == [0, -3, 2, 0, -2, 0]
    # Of equal ones the first.
    assert there_and_back(compressor, array(1, -1, 1, -1)).tolist() == [1, -1, 0, 0]
    # Never none.
    assert there_and_back(TopK(TopKSettings()), array(0.0, 0.5)).tolist() == [0, 0.5]


def test_quantized_numbers_are_the_levels_on_both_sides() -> None:
    values = array(-0.75, 0.5, 0, 0.25, 0.75)
    # With s = 1 and 7: 0.75 and 0 are levels, and come back as they are.
    for bits, size in ((2, 4 + 2), (4, 4 + 3), (8, 4 + 5)):
        compressor = Quantize(QuantizeSettings(bits=bits))  # type: ignore[arg-type]
        assert len(compressor.encode(values, KEY)) == size
        decoded = there_and_back(compressor, values)
        assert decoded[[0, 2, 4]].tolist() == [-0.75, 0, 0.75]
        levels = decoded / 0.75 * (2 ** (bits - 1) - 1)
        assert np.abs(levels - levels.round()).max() < 1e-5


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_numbers_are_right_on_average(bits: int) -> None:
    compressor = Quantize(QuantizeSettings(bits=bits))  # type: ignore[arg-type]
    values = RandomKey(2).numpy().normal(size=700).astype(np.float32)
    draws = [there_and_back(compressor, values, KEY.child(i)) for i in range(2000)]
    # One draw is off by less than a level; 2,000 of them by a 45th of half that.
    level = np.abs(values).max() / (2 ** (bits - 1) - 1)
    assert np.abs(draws[0] - values).max() < level
    assert np.abs(np.mean(draws, axis=0) - values).max() < 5 * level / 2 / 2000**0.5
    again = there_and_back(compressor, values, KEY.child(0))
    assert np.array_equal(again, draws[0])


def test_signs_come_with_the_mean_magnitude_of_512() -> None:
    values = np.concatenate([np.tile(array(1, -3), 256), array(-5, 0)])
    compressor = Sign(NoSettings())
    assert len(compressor.encode(values, KEY)) == 2 * 4 + math.ceil(514 / 8)
    decoded = there_and_back(compressor, values)
    assert decoded[:4].tolist() == [2, -2, 2, -2]
    assert decoded[512:].tolist() == [-2.5, 2.5]


ALL = [
    *(TopK(TopKSettings(fraction)) for fraction in (0.01, 0.3, 1.0)),
    *(Quantize(QuantizeSettings(bits)) for bits in (2, 4, 8)),
    Sign(NoSettings()),
]


@pytest.mark.parametrize("compressor", ALL)
@given(
    size=st.integers(1, 1500),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0, 1e-30, 1, 1e30]),
)
def test_nothing_is_farther_off_than_nothing_at_all(
    compressor: Compressor, size: int, seed: int, scale: float
) -> None:
    """Padding, blocks and bytes that are not full: what comes back has its place."""
    values = (RandomKey(seed).numpy().normal(size=size) * scale).astype(np.float32)
    decoded = there_and_back(compressor, values)
    assert decoded.shape == values.shape
    assert decoded.dtype == np.float32
    assert np.isfinite(decoded).all()
    assert (np.sign(decoded) * np.sign(values) >= 0).all()
    if compressor.error_feedback:
        # What error feedback rests on: ‖p - C(p)‖ ≤ ‖p‖.
        left = np.linalg.norm((values - decoded).astype(np.float64))
        assert left <= np.linalg.norm(values.astype(np.float64)) * (1 + 1e-5)


@pytest.mark.parametrize("compressor", ALL)
@given(code=st.binary(max_size=200), size=st.integers(1, 60))
@example(code=b"\x00\x00\x00\x7f\xff", size=1)  # the largest scale, and levels beyond
@example(code=b"\x00\x00\x80\x7f\x7f", size=1)  # an infinite one
@example(code=b"\x00\x00\x81\x7f\x00", size=1)  # a signalling NaN
@example(code=b"\0\0\0\1\0\0\0\x80" + bytes(8), size=5)  # places 2**24 and -2**31
def test_any_bytes_are_refused_or_stand_for_numbers(
    compressor: Compressor, code: bytes, size: int
) -> None:
    try:
        assert compressor.decode(code, size).shape == (size,)
    except ValueError as error:
        assert "expected" in str(error)  # noqa: PT017 (either is right)


def test_places_beyond_the_model_are_refused() -> None:
    compressor = TopK(TopKSettings(fraction=0.5))
    for places in ([0, 4], [-1, 2], [1, 1], [2, 1]):
        code = np.array(places, "<i4").tobytes() + array(1, 1).tobytes()
        with pytest.raises(ValueError, match="expected ascending places below 4"):
            compressor.decode(code, 4)


def compressed(
    name: str = "top_k", method: str = "fedavg", **settings: Any
) -> Compressed:
    task = task_for(method, TRAINING)
    proxy = noisy(7, 0, seed=2).train
    inner = build(METHODS[method], replace(task, proxy=lambda: proxy))
    return Compressed(task, inner, choice(name, **settings))


def choice(name: str, **settings: Any) -> Choice[Any]:
    return Choice(name, COMPRESSORS[name].settings_type(**settings))


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local"}))
def test_with_all_differences_a_method_is_itself(name: str) -> None:
    """For every method: what arrives is what was sent, but for rounding."""
    method = compressed("top_k", name, fraction=1.0)
    client, data = CLIENTS[1], noisy(7, 4, seed=1)
    before = method.init(CLIENTS, RandomKey(1))
    plain = client_update(method.method, before, client, data)[1]
    kept, sent = client_update(method, before, client, data)
    payload = method.broadcast(before, client, RandomKey(1).child(client))
    # Over the wire and back.
    arrived = unflatten(CompressedUpdate, flatten(sent))
    decoded = method.decoded(payload, arrived)
    tensors, expected = take_apart(decoded).tensors, take_apart(plain).tensors
    assert take_apart(decoded).structure == take_apart(plain).structure
    assert expected
    for path, tensor in expected.items():
        assert torch.allclose(tensors[path], tensor, atol=1e-5), path
    served = method.personalize(payload, kept, data, RandomKey(3))
    assert served(data.train.images).shape == (len(data.train), 3)
    # What a method keeps, it finds again.
    client_update(method, before, client, data, kept, server_round=2)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedbabu", "gpfl", "pfedfda"])
def test_buffers_travel_as_they_are(name: str) -> None:
    """Of models that are shared as a whole, and in part."""
    method = compressed("sign", name)
    before = method.init(CLIENTS, RandomKey(1))
    data = noisy(8, 0, seed=1)
    plain = client_update(method.method, before, "a", data)[1]
    _, sent = client_update(method, before, "a", data)
    payload = method.broadcast(before, "a", RandomKey(1))
    arrived = method.decoded(payload, sent)
    result, expected = (
        method.method.aggregate(before, iter([("a", update)])).weights
        for update in (arrived, plain)
    )
    count = method.task.model.num_parameters
    assert count < len(result)
    assert torch.allclose(result[count:], expected[count:], atol=1e-6)
    assert not torch.allclose(result[:count], expected[:count], atol=1e-6)


@pytest.mark.parametrize("name", ["top_k", "sign"])
def test_what_is_left_out_is_sent_later(name: str) -> None:
    """Σ C(p) + e = Σ Δ: nothing is lost, however many rounds it takes."""
    method, kept = compressed(name), None
    before = method.init(CLIENTS, RandomKey(1))
    payload = method.broadcast(before, "a", RandomKey(1))
    count, data = method.task.model.num_parameters, noisy(8, 0, seed=1)
    sum_of_differences, arrived = torch.zeros(count), torch.zeros(count)
    for number in range(1, 6):
        plain = client_update(method.method, before, "a", data, None, number)[1]
        kept, sent = client_update(method, before, "a", data, kept, number)
        decoded = method.decoded(payload, sent)
        sum_of_differences += (plain.weights - payload.weights)[:count]
        arrived += (decoded.weights - payload.weights)[:count]
        left_out = kept.left_out["weights"]
        assert torch.allclose(arrived + left_out, sum_of_differences, atol=1e-5)
        assert float(left_out.norm()) > 0.01


def test_two_clients_by_hand() -> None:
    """One pixel, W = 0: a step of rate 1 moves W by (1/2 - 1, 1/2) for label 1."""
    task = linear_task(TrainingSettings(learning_rate=1.0, batch_size=9, local_steps=1))
    inner = FedAvg(task, FedAvg.settings_type())
    method = Compressed(task, inner, choice("top_k", fraction=0.5))
    payload = ModelPayload(torch.zeros(2))
    kept, sent = method.client_update(payload, None, white([1, 1]), 1, KEY)
    # |Δ| is (1/2, 1/2): the first of equals is sent, the other one kept.
    assert method.decoded(payload, sent).weights.tolist() == [-0.5, 0.0]
    assert kept.left_out["weights"].tolist() == [0.0, 0.5]
    # The second time that place has 1/2 + 1/2.
    kept, sent = method.client_update(payload, kept, white([1, 1]), 2, KEY)
    assert method.decoded(payload, sent).weights.tolist() == [0.0, 1.0]
    assert kept.left_out["weights"].tolist() == [-0.5, 0.0]
    state = method.aggregate(
        ModelState(payload.weights),
        [
            ("a", method.decoded(payload, sent)),
            ("b", ModelUpdate(torch.ones(2), 6, 0.1)),
        ],
    )
    assert state.weights.tolist() == [0.75, 1.0]


def test_a_site_may_keep_its_loss_to_itself() -> None:
    method = compressed()
    before = method.init(CLIENTS, RandomKey(1))
    _, sent = client_update(method, before, "a", noisy(6, 0, seed=0))
    assert sent.train_loss > 0
    filtered = MetricsPolicy(share_metrics=False).filter_update(sent)
    payload = method.broadcast(before, "a", RandomKey(1))
    decoded = method.decoded(payload, filtered)
    assert math.isnan(decoded.train_loss)
    assert decoded.num_examples == 6
    assert str(sent.train_loss) not in flatten(filtered).layout


def test_diverged_training_is_reported() -> None:
    method = compressed()

    def diverged(*_: Any) -> Any:
        weights = torch.full_like(method.task.initial_weights, math.nan)
        return None, ModelUpdate(weights, 1, 0.0)

    method.method = changed(method.method, client_update=diverged)
    before = method.init(CLIENTS, RandomKey(1))
    with pytest.raises(TrainingDivergedError, match="weights of the client's update"):
        client_update(method, before, "a", noisy(6, 0, seed=0))


def damaged(sent: CompressedUpdate) -> dict[str, CompressedUpdate]:
    weights, structure = sent.coded["weights"], json.loads(sent.structure)
    structure["fields"]["more"] = 1
    return {
        "expected a code of": replace(sent, coded={"weights": weights[1:]}),
        "expected a code, found": replace(sent, coded={"weights": weights[None]}),
        "found an array of (2,)": replace(sent, coded={"weights": weights[:2]}),
        "no tensor of this name": replace(sent, shapes={"weights": (3, 2**40)}),
        "the shapes of tensors": replace(sent, shapes={"weights": (-1,)}),
        "is missing": replace(sent, coded={}, shapes={}),
        "no field has": replace(sent, whole={"other": weights}),
        "has no more": replace(sent, structure=json.dumps(structure)),
        "expected JSON": replace(sent, structure="{"),
    }


PROBLEMS = list(
    damaged(
        CompressedUpdate(1, 0.5, '{"fields": {}}', {}, {"weights": torch.zeros(9)}, {})
    )
)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_damaged_update_is_refused(name: str, problem: str) -> None:
    method = compressed(name)
    before = method.init(CLIENTS, RandomKey(1))
    _, sent = client_update(method, before, "a", noisy(6, 0, seed=0))
    payload = method.broadcast(before, "a", RandomKey(1))
    with pytest.raises(CodecError) as caught:
        method.decoded(payload, damaged(sent)[problem])
    assert problem in str(caught.value)


def run(tmp_path: Path, number: int, **training: Any) -> list[dict[str, Any]]:
    given = document(
        "fedavg",
        training={"num_rounds": 3, "batch_size": 64, **training},
        run={"engine": "serial"},
    )
    chosen = load_experiment(given, experiment_catalogue(), folder=tmp_path)
    folder = RunFolder.create(tmp_path / str(number), chosen)
    simulate(open_workbench(chosen), folder, Observer(), ["test"])
    return folder.rounds()


def test_bytes_up_are_what_is_sent(tmp_path: Path) -> None:
    plain = run(tmp_path, 0)
    size = plain[0]["bytes_up"] // 2 // 4
    bits = {"name": "quantize", "bits": 4}
    rounds = run(tmp_path, 1, compression=bits)
    expected = 4 * math.ceil((4 * math.ceil(size / 512) + math.ceil(size / 2)) / 4)
    assert [row["bytes_up"] for row in rounds] == [2 * expected] * 3
    assert [row["bytes_down"] for row in rounds] == [row["bytes_down"] for row in plain]


OWN = """
import numpy as np
from dataclasses import dataclass
from knnper import Settings
from knnper.strategies.core.compression import Compressor

@dataclass(frozen=True)
class HalfSettings(Settings):
    type: str = "<f2"

class Half(Compressor):
    '''Half precision.'''
    error_feedback = False
    settings_type = HalfSettings

    def encode(self, values, rng):
        return values.astype(self.settings.type).tobytes()

    def decode(self, code, size):
        return np.frombuffer(code, self.settings.type, size).astype(np.float32)
"""


def test_your_own(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(OWN)
    plain = run(tmp_path, 0)
    rounds = run(tmp_path, 1, compression="halves:Half")
    assert rounds[0]["bytes_up"] == pytest.approx(plain[0]["bytes_up"] / 2, abs=8)
    assert rounds[2]["train_loss"] == pytest.approx(plain[2]["train_loss"], rel=0.01)


def test_your_own_that_loses_numbers_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(OWN.replace("type, size", "type, size // 2"))
    with pytest.raises(RunError, match=r"expected \d+ numbers, found"):
        run(tmp_path, 0, compression="short:Half")


@pytest.mark.parametrize(
    ("given", "place", "hint"),
    [
        ("topk", "training.compression.name", "did you mean 'top_k'"),
        ({"name": "top_k", "fraction": 0}, "training.compression.fraction", "greater"),
        ({"name": "quantize", "bits": 3}, "training.compression.bits", "2, 4 or 8"),
        ({"name": "sign", "bits": 1}, "training.compression.bits", "unknown"),
    ],
)
def test_wrong_settings_are_explained(given: Any, place: str, hint: str) -> None:
    refused(document(training={"compression": given}), place, hint)
