"""pFedGP: Gaussian-process classifiers on a shared representation.

Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with
Gaussian Processes", NeurIPS 2021, section 4 and Algorithm 1, with the tree of binary
processes of Achituve, Navon, Yemini, Chechik, Fetaya, "GP-Tree: A Gaussian Process
Classifier for Few-Shot Incremental Learning", ICML 2021; a baseline of Marfoq et al.
2022 (section 5, Tables 2 and 3), which gives no formulas. The server averages φ alone;
a client's classifier is a Gaussian process with the kernel

    k(x, x') = s κ(φ(x) / l, φ(x') / l)

over its own examples, so that no head is trained. A round maximises the predictive
likelihood Σ_i log p(y_i | x_i, other examples) by φ.

Departures: the Pólya-Gamma variables are not drawn by Gibbs sampling, but their means
are found by coordinate ascent (mean field), so that a client's classifier is a function
of its data and its likelihood has no sampling noise. The likelihood is that of each
example of a mini-batch given the rest of it, in closed form; the paper takes all of a
client's data in one step, and the authors' code parts them in two, class by class, and
predicts one part from the other. The mean weights each client by its number of
examples, the authors' code weights clients equally. Only full Gaussian processes: no
inducing points.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.data.examples import ClientData
from knnper.errors import Problem
from knnper.experiment import Experiment, PositiveFloat, PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import Updates, average_weights
from knnper.strategies.core.gaussian_process import (
    Kernel,
    KernelName,
    TreeClassifier,
    class_tree,
    fit_classifier,
    levels_of,
    predictive_objective,
)
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.records import ModelUpdate, NoState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd


@dataclass(frozen=True)
class PFedGPSettings(Settings):
    """The Gaussian processes; kernel and scales by default as in the paper's runs.

    Attributes
    ----------
    kernel
        κ: ``rbf`` is exp(-|z - z'|² / 2), ``linear`` is zᵀ z'.
    output_scale
        s, the prior variance of the latent function. It is not trained, nor is l: φ
        can learn any scale itself.
    length_scale
        l, in units of representations.
    num_iterations
        Rounds of coordinate ascent for the means of the Pólya-Gamma variables.
    max_examples
        At most so many examples of a client are in its classifier, drawn at random:
        its cost is cubic in them.
    """

    kernel: KernelName = "rbf"
    output_scale: PositiveFloat = 8.0
    length_scale: PositiveFloat = 1.0
    num_iterations: PositiveInt = 10
    max_examples: PositiveInt = 1000


@dataclass(frozen=True)
class SharedNetwork(Record):
    """The server's state, and what it sends.

    It is no `ModelState`: nobody is served its head, which is never trained.
    """

    network: Tensor  # φ and the head as it was at first, shape (num_weights,)


@dataclass(frozen=True)
class GaussianProcessPredictor:
    """Serves a client's Gaussian processes on φ."""

    task: Task  # Gives the architecture
    network: Tensor  # φ, as in `SharedNetwork`
    # From representations (n, p) to probabilities (n, c); the same for all who have no
    # examples.
    head: TreeClassifier
    # Makes the predictor that does not know the validation split; None where this one
    # does not.
    trained_alone: "Callable[[], GaussianProcessPredictor] | None" = None

    def __call__(self, images: Tensor) -> Tensor:
        """Return p(y|x), shape (n, c), of images (n, height, width, channels)."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p)."""
        return self.task.embed(self.network, images)

    def without_validation(self) -> "GaussianProcessPredictor":
        """Return the predictor whose examples are the training split alone."""
        return self if self.trained_alone is None else self.trained_alone()

    def describe(self) -> Mapping[str, float]:
        """Return the number of examples in the classifier."""
        return {"num_gp_examples": float(self.head.num_examples)}


class PFedGP(Method):
    """A shared network; each client's classifier is Gaussian processes on it."""

    title = "pFedGP"
    source = "Achituve et al. 2021 (NeurIPS), Algorithm 1; Marfoq et al. 2022"
    unseen = "the shared network and Gaussian processes over the client's own examples"
    reference_title = None
    serves_one_model = False
    personalizes_by_inference = True
    state_type = SharedNetwork
    payload_type = SharedNetwork

    settings: PFedGPSettings

    def __init__(self, task: Task, settings: PFedGPSettings) -> None:
        super().__init__(task, settings)
        self._kernel = Kernel(
            settings.kernel, settings.output_scale, settings.length_scale
        )
        self._num_classes, self._of_network = task.spec.num_classes, ~task.head_mask

    def init(self, clients: Sequence[str], rng: RandomKey) -> SharedNetwork:
        return SharedNetwork(self.task.initial_weights)

    def broadcast(
        self, state: SharedNetwork, client_id: str, rng: RandomKey
    ) -> SharedNetwork:
        return state

    def client_update(
        self,
        payload: SharedNetwork,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, ModelUpdate]:
        embeddings = self.task.embed(payload.network, data.train.images)
        tree = class_tree(embeddings, data.train.labels)
        levels = levels_of(tree, self._num_classes, self.task.model.device)
        trained = local_sgd(
            self.task,
            payload.network,
            data.train,
            self.task.training.learning_rate_at(server_round),
            rng,
            trainable=self._of_network,
            objective=predictive_objective(
                levels, self._kernel, self.settings.num_iterations
            ),
        )
        return NoState(), trained.update(len(data.train))

    def _fit(
        self, embeddings: Tensor, labels: Tensor, rng: RandomKey
    ) -> TreeClassifier:
        chosen = _at_most(self.settings.max_examples, len(labels), rng)
        return fit_classifier(
            embeddings[chosen],
            labels[chosen],
            self._num_classes,
            self._kernel,
            self.settings.num_iterations,
        )

    def personalize(
        self,
        payload: SharedNetwork,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> GaussianProcessPredictor:
        network, (train, held_out) = payload.network, (data.train, data.validation)
        of_train = self.task.embed(network, train.images)
        of_both = torch.cat([of_train, self.task.embed(network, held_out.images)])

        def alone() -> GaussianProcessPredictor:
            head = self._fit(of_train, train.labels, rng)
            return GaussianProcessPredictor(self.task, network, head)

        head = self._fit(of_both, torch.cat([train.labels, held_out.labels]), rng)
        trained_alone = alone if len(held_out) else None
        return GaussianProcessPredictor(self.task, network, head, trained_alone)

    def aggregate(
        self, state: SharedNetwork, updates: Updates[ModelUpdate]
    ) -> SharedNetwork:
        return SharedNetwork(average_weights(updates).weights)

    def update_problem(self, payload: SharedNetwork, update: ModelUpdate) -> str | None:
        return wrong_shape(update, weights=(self.task.model.num_weights,))

    def started_from(
        self, payload: SharedNetwork, update: ModelUpdate
    ) -> Mapping[str, Tensor]:
        return {"weights": payload.network}

    @staticmethod
    def check(settings: PFedGPSettings, experiment: Experiment) -> Sequence[Problem]:
        if experiment.training.batch_size > 1:
            return ()
        return (
            Problem(
                "training.batch_size",
                "found 1, expected 2 or more with pfedgp: each example is predicted "
                "from the others of its mini-batch; the larger it is, the better",
            ),
        )


def _at_most(number: int, num_examples: int, rng: RandomKey) -> Tensor:
    """Return positions of examples, ascending: all, or ``number`` at random."""
    if num_examples <= number:
        return torch.arange(num_examples)
    generator = rng.child("examples").numpy()
    drawn = generator.choice(num_examples, size=number, replace=False)
    return torch.from_numpy(drawn).sort().values
