"""``python -m papers.pronouns``: write a table of sentences with masked thou or you.

A client is a speaking role of Shakespeare's plays. An example is a sentence with forms
of only one of the two pronouns, all of them masked; the label is the pronoun. It
depends on the speaker and the addressee, and so on the client.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

FORMS = {
    "thou": ("thou", "thee", "thy", "thine", "thyself"),
    "you": ("you", "ye", "your", "yours", "yourself", "yourselves"),
}
_LABEL_OF = {form: label for label, forms in FORMS.items() for form in forms}
_FORM = re.compile(rf"\b({'|'.join(_LABEL_OF)})\b", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.!?;:]+")
_FEWEST_WORDS, _MOST_WORDS = 4, 40


def sentences(text: str, mask: str) -> Iterator[tuple[str, str]]:
    """Yield the masked sentences of a role with their labels."""
    for sentence in _SENTENCE.findall(" ".join(text.split())):
        labels = {_LABEL_OF[form.lower()] for form in _FORM.findall(sentence)}
        num_words = len(sentence.split())
        if len(labels) == 1 and _FEWEST_WORDS <= num_words <= _MOST_WORDS:
            yield _FORM.sub(mask, sentence.strip()), labels.pop()


def main(
    roles: Annotated[Path, typer.Argument(help="Folder of PLAY_ROLE.txt files.")],
    table: Annotated[Path, typer.Argument(help="The .csv file to write.")],
    fewest: Annotated[int, typer.Option(help="Sentences of a role, at least.")] = 30,
    mask: Annotated[str, typer.Option(help="In place of a pronoun.")] = "[MASK]",
) -> None:
    """Write one row per sentence: role, text, label."""
    num_roles = 0
    with table.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("role", "text", "label"))
        for path in sorted(roles.glob("*.txt")):
            examples = list(sentences(path.read_text(encoding="utf-8"), mask))
            if len(examples) >= fewest:
                num_roles += 1
                rows.writerows((path.stem, *example) for example in examples)
    typer.echo(f"{num_roles} roles are in {table}")


if __name__ == "__main__":
    typer.run(main)
