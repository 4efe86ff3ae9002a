import pytest

from knnper.strategies.core.method import NEWCOMER, NoSettings
from knnper.strategies.fedavg import FedAvg
from tests.strategies.tiny import KEY, linear_task, of_name, run_rounds, white


def test_one_round_by_hand() -> None:
    method = FedAvg(linear_task(learning_rate=1.0), NoSettings())
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, _ = run_rounds(method, clients, num_rounds=1)
    # From 0 every p is (½, ½). Client a steps to (½, -½), client b to (-½, ½);
    # with 3 examples and 1 the mean is (¾ · ½ - ¼ · ½, ...) = (¼, -¼).
    assert state.weights.tolist() == [0.25, -0.25]


def test_everyone_is_served_the_global_model() -> None:
    task = linear_task(learning_rate=1.0)
    method = of_name("fedavg", task)
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, _ = run_rounds(method, clients, num_rounds=1)
    payload = method.broadcast(state, NEWCOMER, KEY)
    predictor = method.personalize(payload, None, clients["b"], KEY)
    # Logits (¼, -¼): p(0) = 1 / (1 + exp(-½)) = 0.62246.
    served = predictor(clients["b"].train.images)
    assert served[0].tolist() == pytest.approx([0.62246, 0.37754], abs=1e-5)
    assert predictor.describe() == {}
