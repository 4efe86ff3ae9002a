"""FedAvg: one global model, the mean of what the clients trained.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1; aggregation as in
Marfoq et al. 2022, Eq. 13.
"""

from knnper.strategies.core.method import Method


class FedAvg(Method):
    """One global model, the mean of the clients' models."""

    title = "FedAvg"
    source = "McMahan et al. 2017, Algorithm 1; Marfoq et al. 2022 Eq. 13"
    ends_with_global_model = True
    serves_global_model = True
    personalizes_by_inference = True
