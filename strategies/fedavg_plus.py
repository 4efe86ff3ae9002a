"""FedAvg+: the global model, fine-tuned at each client.

Jiang, Konečný, Rush, Kannan, "Improving Federated Learning Personalization via Model
Agnostic Meta Learning", 2019; a baseline of Marfoq et al. 2022, section 5. It is FedAvg
with `knnper.strategies.fine_tuning` on top.
"""

from knnper.strategies.fedavg import FedAvg


class FedAvgPlus(FedAvg):
    """The global model, fine-tuned on each client's data."""

    title = "FedAvg+"
    source = "Jiang et al. 2019; Marfoq et al. 2022, section 5"
    unseen = "the global model, fine-tuned on the client's data"
    reference_title = "FedAvg"
    personalization = "fine_tuning"
