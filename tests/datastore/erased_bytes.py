"""A search for the bytes of examples in the files of a store."""

from pathlib import Path

import numpy as np

from knnper.datastore.connection import open_reader
from knnper.datastore.examples import Ids
from knnper.datastore.store import DATABASE
from knnper.datastore.tables import blob_tables, read_blobs

WINDOW_BYTES = 16


def stored_bytes(folder: Path, ids: Ids) -> list[bytes]:
    """Read the inputs and all embeddings of examples from the database."""
    with open_reader(folder / DATABASE) as connection:
        return [
            content
            for table in blob_tables(connection)
            for example, content in read_blobs(connection, table)
            if example in ids
        ]


def files_with(folder: Path, secrets: list[bytes]) -> set[str]:
    """Name the files that hold 16 bytes of a secret, by their suffix or name.

    Windows of 16 bytes at multiples of 64 are searched for at every offset.
    """
    windows = [
        secret[start : start + WINDOW_BYTES]
        for secret in secrets
        for start in range(0, len(secret), 4 * WINDOW_BYTES)
    ]
    assert windows
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        path.suffix or path.name
        for path, content in contents.items()
        if _may_hold(content, windows) and any(window in content for window in windows)
    }


def _may_hold(content: bytes, windows: list[bytes]) -> bool:
    """Compare the first 8 bytes of the windows with those at each offset, quickly."""
    starts = np.frombuffer(b"".join(window[:8] for window in windows), np.uint64)
    return any(
        np.isin(
            np.frombuffer(
                content, np.uint64, (len(content) - offset) // 8, offset=offset
            ),
            starts,
        ).any()
        for offset in range(min(8, len(content)))
    )
