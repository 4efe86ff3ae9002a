"""What a policy remembers, as text."""

import json

import numpy as np

from datastore.policy.base import StreamState


def encode_stream(stream: StreamState) -> str:
    """Return what a policy remembers as JSON."""
    document = {
        "num_offered": stream.num_offered,
        "num_seen": stream.num_seen.tolist(),
        "was_largest": stream.was_largest.tolist(),
    }
    return json.dumps(document)


def decode_stream(text: str) -> StreamState:
    """Return what `encode_stream` wrote."""
    document = json.loads(text)
    return StreamState(
        document["num_offered"],
        np.array(document["num_seen"], dtype=np.int64),
        np.array(document["was_largest"], dtype=np.bool_),
    )
