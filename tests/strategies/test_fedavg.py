from knnper.strategies.core.method import NoSettings
from knnper.strategies.fedavg import FedAvg
from tests.strategies.tiny import linear_task, run_rounds, white


def test_one_round_by_hand() -> None:
    method = FedAvg(linear_task(learning_rate=1.0), NoSettings())
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, _ = run_rounds(method, clients, num_rounds=1)
    # From 0 every p is (½, ½). Client a steps to (½, -½), client b to (-½, ½);
    # with 3 examples and 1 the mean is (¾ · ½ - ¼ · ½, ...) = (¼, -¼).
    assert state.weights.tolist() == [0.25, -0.25]
