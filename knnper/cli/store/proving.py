"""What a proof of absence says."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knnper.cli.store.options import counted, megabytes

if TYPE_CHECKING:
    from datastore.care.erasure import Proof

SHOWN = 10


def proof_lines(
    proof: "Proof", folder: Path, what: str, names: Sequence[str]
) -> Iterator[str]:
    """Yield in sentences what was found of some ``what`` in ``folder``.

    Parameters
    ----------
    proof
        What was found.
    folder
        Of the store.
    what
        Names the secrets together.
    names
        Names each of them.
    """
    place = (
        f"the {counted(proof.num_files, 'file')} ({megabytes(proof.num_bytes)}) of "
        f"{folder}"
    )
    num_looked_for = proof.num_secrets - len(proof.unprovable)
    if proof.holds and num_looked_for:
        yield (
            f"none of their bytes are in any of {place} ({what} looked for: "
            f"{num_looked_for})"
        )
    yield from _first(
        f"bytes of {names[one.secret]} are in {one.file} at {one.offset}"
        for one in proof.traces
    )
    yield from _first(
        f"{names[secret]} is not absent: it is, in every byte, example {example}"
        for secret, example in sorted(proof.copies.items())
    )
    yield from _first(
        f"{names[secret]}: that it is absent cannot be proven; nothing of it, as of an "
        "image of one colour, can be told apart from what may be stored"
        for secret in proof.unprovable
    )


def as_document(proof: "Proof", names: Sequence[str]) -> dict[str, Any]:
    """Return a proof as plain values; ``names`` name what was looked for."""
    document = asdict(proof)
    document["traces"] = [
        {**asdict(trace), "file": str(trace.file), "secret": names[trace.secret]}
        for trace in proof.traces
    ]
    document["copies"] = {names[one]: at for one, at in proof.copies.items()}
    document["unprovable"] = [names[one] for one in proof.unprovable]
    return {"absent": proof.is_absent, **document}


def _first(lines: Iterable[str]) -> Iterator[str]:
    """Yield the first lines, and how many more there are."""
    found = list(lines)
    yield from found[:SHOWN]
    if len(found) > SHOWN:
        yield f"and {len(found) - SHOWN} more like this"
