"""What a proof of absence says."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knnper.cli.store.options import counted, megabytes

if TYPE_CHECKING:
    from datastore.care.erasure import Proof

SHOWN = 10


def proof_lines(proof: "Proof", folder: Path, what: str) -> Iterator[str]:
    """Yield in sentences what was found of some ``what`` in ``folder``."""
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
    for trace in proof.traces[:SHOWN]:
        yield f"bytes of number {trace.secret} are in {trace.file} at {trace.offset}"
    if len(proof.traces) > SHOWN:
        yield f"and {len(proof.traces) - SHOWN} more places in {place}"
    if proof.copies:
        ids = sorted(set(proof.copies.values()))
        more = ", ..." if len(ids) > SHOWN else ""
        yield (
            f"{what} that are stored, equal in every byte, as other examples: "
            f"{len(proof.copies)}, by id {', '.join(map(str, ids[:SHOWN]))}{more}"
        )
    if proof.unprovable:
        yield (
            f"{what} that cannot be told apart from what is stored, such as images of "
            f"one colour, and were not looked for: {len(proof.unprovable)}"
        )


def as_document(proof: "Proof") -> dict[str, Any]:
    """Return a proof as plain values."""
    document = asdict(proof)
    document["traces"] = [
        {**asdict(trace), "file": str(trace.file)} for trace in proof.traces
    ]
    return {"absent": proof.holds, **document}
