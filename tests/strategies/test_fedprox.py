import torch

from knnper.experiment import TrainingSettings
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.fedprox import FedProx, FedProxSettings
from tests.strategies.tiny import (
    KEY,
    linear_task,
    white,
)

TRAINING = TrainingSettings(local_epochs=2, batch_size=1, learning_rate=0.5)


def test_two_steps_by_hand() -> None:
    """Logits (y, -y), x = 1, label 0: the slope of the loss in y is -σ(-2 y)."""
    method = FedProx(linear_task(TRAINING), FedProxSettings(prox_weight=0.4))
    # The server's model, which is not the initial one any more: that is 0.
    payload = ModelPayload(torch.tensor([1.0, -1.0]))
    _, update = method.client_update(payload, None, white([0]), 1, KEY)
    # y ← (y + ½ σ(-2 y) + ½ · 0.4 · w) / (1 + ½ · 0.4), twice, from y = w = 1.
    first = (1 + 0.5 * torch.sigmoid(torch.tensor(-2.0)) + 0.2) / 1.2
    second = (first + 0.5 * torch.sigmoid(-2 * first) + 0.2) / 1.2
    torch.testing.assert_close(update.weights, torch.stack([second, -second]))
