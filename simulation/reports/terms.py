"""Words for settings, as tables and charts show them."""

from collections.abc import Mapping

# By dotted key, all different; the symbols are those of Marfoq et al. 2022.
TERMS: Mapping[str, str] = {
    "partition.alpha": "\N{GREEK SMALL LETTER ALPHA}",
    "partition.beta": "β",
    "partition.unseen_train_fraction": "capacity",
    "personalization.num_neighbors": "k",
    "personalization.kernel_scale": "\N{GREEK SMALL LETTER SIGMA}",
    "personalization.knn_weights": "λ",
    "training.batch_size": "batch size",
    "training.learning_rate": "learning rate",
    "training.local_epochs": "local epochs",
    "training.local_steps": "local steps",
    "training.momentum": "momentum",
    "training.num_rounds": "rounds",
    "training.participation": "client sampling rate",
    "training.weight_decay": "weight decay",
}


def term_of(key: str) -> str:
    """Return the field's term for a setting, by default its dotted key."""
    return TERMS.get(key, key)
