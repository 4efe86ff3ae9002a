"""GPFL on a linear network: a round by formulas in float64, and what is served."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from knnper.data.examples import ClientData
from knnper.embedding_model import EmbeddingModel
from knnper.experiment import TrainingSettings
from knnper.strategies.core.sharing import PersonalPart
from knnper.strategies.core.task import Task
from knnper.strategies.fedper import FedPer, FedPerSettings
from knnper.strategies.gpfl import GPFL, GPFLSettings, GPFLUpdate, ModelAndGuidance
from tests.strategies.tiny import (
    FOUR_PIXELS,
    KEY,
    noisy,
    normed_task,
    run_rounds,
    task_of,
)

HALF = TrainingSettings(learning_rate=0.5)
SETTINGS = GPFLSettings(magnitude_weight=0.3, guidance_decay=0.2)
P, C = 3, 3
CLIENTS = {"a": noisy(5, 2, seed=1), "b": noisy(3, 2, seed=2)}


class LinearBody(EmbeddingModel):
    """From four pixels to three features and three logits, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = P, C
        self.body = nn.Linear(4, P, bias=False)
        self.classifier = nn.Linear(P, C, bias=False)

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x.flatten(start_dim=1))
        return features


def linear_body_task() -> Task:
    return task_of(LinearBody, FOUR_PIXELS, HALF)


def parts_of(guidance: Tensor) -> list[Tensor]:
    """Return E, and of the scale and the shift W, b, and LayerNorm's gain and bias."""
    shapes: list[Sequence[int]] = [(C, P), *[(P, P), (P,), (P,), (P,)] * 2]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    tensors = torch.split(guidance.double(), sizes)
    return [
        tensor.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)
    ]


def valve(z: Tensor, condition: Tensor, guidance: Sequence[Tensor]) -> Tensor:
    outputs = []
    for weight, bias, gain, offset in (guidance[1:5], guidance[5:9]):
        inside = (weight @ condition + bias).clamp_min(0)
        away = inside - inside.mean()
        outputs.append(away / (away.square().mean() + 1e-5).sqrt() * gain + offset)
    return (z * (1 + outputs[0]) + outputs[1]).clamp_min(0)


def pixels_of(data: ClientData) -> Tensor:
    return (data.train.images.double().reshape(-1, 4) / 255 - 0.5) / 0.25


def condition_of(data: ClientData, classes: Tensor) -> Tensor:
    return torch.stack([classes[label] for label in data.train.labels]).mean(dim=0)


def after_a_step(
    weights: Tensor, guidance: Tensor, data: ClientData
) -> tuple[Tensor, Tensor]:
    """Return network and guidance after one step on all of a client's examples."""
    body, head = torch.split(weights.double(), [4 * P, C * P])
    leaves = [body.reshape(P, 4), head.reshape(C, P), *parts_of(guidance)]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    body, head, classes, *_ = leaves
    sent, labels = classes.detach().clone(), data.train.labels
    z = pixels_of(data) @ body.T
    personal = valve(z, condition_of(data, sent), leaves[2:])
    shared = valve(z, sent.mean(dim=0), leaves[2:])
    loss = torch.zeros(()).double()
    for of_own, of_shared, label in zip(personal, shared, labels, strict=True):
        direction = of_shared / of_shared.norm().clamp_min(1e-12)
        cosines = torch.stack([direction @ row / row.norm() for row in classes])
        loss = loss - (head @ of_own).log_softmax(0)[label]
        loss = loss - cosines.log_softmax(0)[label]
        loss = loss + 0.3 * (of_shared - sent[label]).norm()
    slopes = torch.autograd.grad(loss / len(labels), leaves)
    decays = [0.0, 0.0, *[0.2] * 9]
    with torch.no_grad():
        stepped = [
            (leaf - 0.5 * (slope + decay * leaf)).flatten()
            for leaf, slope, decay in zip(leaves, slopes, decays, strict=True)
        ]
    return torch.cat(stepped[:2]), torch.cat(stepped[2:])


def test_a_round_by_formulas() -> None:
    task = linear_body_task()
    method = GPFL(task, SETTINGS)
    before = method.init(("a", "b"), KEY.child("init"))
    after, memory = run_rounds(method, CLIENTS, num_rounds=1)
    models = {
        name: after_a_step(before.weights, before.guidance, data)
        for name, data in CLIENTS.items()
    }
    weights, guidance = (
        (5 * models["a"][place] + 3 * models["b"][place]) / 8 for place in (0, 1)
    )
    # The server's head stays the initial one; each client keeps its own.
    body = ~task.head_mask
    expected = torch.where(body, weights.float(), before.weights)
    torch.testing.assert_close(after.weights, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.guidance, guidance.float(), rtol=1e-4, atol=1e-5)
    for name, (model, _) in models.items():
        head = model[task.head_mask].float()
        torch.testing.assert_close(memory[name].personal, head, rtol=1e-4, atol=1e-5)


def test_what_is_served_by_formulas() -> None:
    task = linear_body_task()
    method = GPFL(task, SETTINGS)
    payload = method.init(("a", "b"), KEY.child("init"))
    personal = PersonalPart(torch.arange(9.0) / 9)
    served = method.personalize(payload, personal, CLIENTS["a"], KEY)
    guidance = parts_of(payload.guidance)
    condition = condition_of(CLIENTS["a"], guidance[0])
    body = payload.weights[: 4 * P].double().reshape(P, 4)
    through = valve(pixels_of(CLIENTS["b"]) @ body.T, condition, guidance)
    expected = (through @ personal.personal.double().reshape(C, P).T).softmax(dim=1)
    probabilities = served(CLIENTS["b"].train.images)
    torch.testing.assert_close(probabilities, expected.float(), rtol=1e-4, atol=1e-5)
    # Who was never drawn trains the initial head alone, on both splits.
    short = GPFL(task, replace(SETTINGS, unseen_epochs=1))
    unseen = short.personalize(payload, None, CLIENTS["a"], KEY)
    data = CLIENTS["a"].train_and_validation()
    both = ClientData(data, CLIENTS["a"].validation)
    condition = condition_of(both, guidance[0])
    through = valve(pixels_of(both) @ body.T, condition, guidance)
    head = payload.weights[4 * P :].double().reshape(C, P)
    wrong = (through @ head.T).softmax(dim=1) - torch.eye(C).double()[data.labels]
    head = head - 0.5 * wrong.T @ through / len(data)
    expected = (through @ head.T).softmax(dim=1)
    probabilities = unseen(data.images)
    torch.testing.assert_close(probabilities, expected.float(), rtol=1e-4, atol=1e-5)


def test_with_an_open_valve_and_no_classes_a_step_is_fedpers() -> None:
    training = TrainingSettings(local_steps=1, batch_size=3, learning_rate=0.1)
    task = normed_task(training)  # of which embeddings are not negative
    method = GPFL(task, replace(SETTINGS, magnitude_weight=0.0))
    start = method.init(("a", "b"), KEY)
    nothing = ModelAndGuidance(start.weights, torch.zeros_like(start.guidance))
    fedper, data = FedPer(task, FedPerSettings()), CLIENTS["a"]
    personal = PersonalPart(torch.linspace(-1, 1, 15))
    kept, update = method.client_update(nothing, personal, data, 1, KEY)
    part, expected = fedper.client_update(start, personal, data, 1, KEY)
    assert torch.equal(kept.personal, part.personal)
    assert torch.equal(update.shared, expected.shared)
    _, other = method.client_update(start, personal, data, 1, KEY)
    assert not torch.equal(other.shared, expected.shared)
    queries = CLIENTS["b"].train.images
    served = method.personalize(nothing, personal, data, KEY)(queries)
    assert torch.equal(served, fedper.personalize(start, personal, data, KEY)(queries))


def test_guidance_of_another_shape_is_refused() -> None:
    method = GPFL(linear_body_task(), SETTINGS)
    payload = method.init(("a",), KEY)
    short = payload.guidance[:-1]
    update = GPFLUpdate(payload.weights[: 4 * P], 5, 0.5, short)
    assert "guidance: expected shape" in str(method.update_problem(payload, update))
    assert method.started_from(payload, update)["guidance"] is payload.guidance
