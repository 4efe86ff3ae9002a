"""Text for tables, charts and pages: words for settings, and names made safe.

Names of runs and users may come from elsewhere: each stays one line, one cell, and no
formula.
"""

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

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

# Unicode categories of controls, unpaired surrogates, and line and paragraph ends.
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")
_NOT_IN_XML = "\ufffe\uffff"


def one_line(text: str) -> str:
    """Replace controls, line ends and characters that XML forbids by spaces."""
    return "".join(
        " "
        if unicodedata.category(character) in _NO_TEXT or character in _NOT_IN_XML
        else character
        for character in text
    )


def chart_text(text: str) -> str:
    """Return a text as one line that matplotlib draws literally, formulas too."""
    return one_line(text).replace("$", r"\$")


def markdown_text(text: str) -> str:
    """Return a text as part of a line of Markdown, without any HTML."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return markdown_text(text).replace("|", r"\|")


def percent(fraction: float) -> str:
    """Format a fraction of 1 in percent with one digit."""
    return f"{100 * fraction:.1f} %"


def as_text(value: Any) -> str:
    """Format the value of a setting for tables."""
    return value if isinstance(value, str) else json.dumps(value)


def term_of(key: str) -> str:
    """Return the field's term for a setting, by default its dotted key."""
    return TERMS.get(key, key)
