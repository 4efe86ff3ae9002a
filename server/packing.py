"""Requests in the form in which they travel, each record written once."""

from collections import Counter
from pathlib import Path

from knnper.transport.codec import is_same
from knnper.transport.messages import Packed, discard, pack
from server.federation import Request


class Packer:
    """Packs the records of requests; one that goes to many clients only once.

    What was packed is given back when the last request that it was packed for is
    answered and a later request brought another record.

    Parameters
    ----------
    shared_folder
        Where numbers may be left as files; None if they travel in the message.
    """

    def __init__(self, shared_folder: Path | None) -> None:
        self._shared_folder = shared_folder
        self._latest: dict[str, tuple[object, Packed]] = {}
        self._in_use: dict[int, Packed] = {}
        self._num_users: Counter[int] = Counter()

    def pack_request(self, request: Request) -> dict[str, Packed]:
        """Return the request's records by name, ready to be sent."""
        records = {"payload": request.payload}
        if request.reference is not None:
            records["reference"] = request.reference
        return {name: self._pack(name, record) for name, record in records.items()}

    def answered(self, records: dict[str, Packed]) -> None:
        """Say that a request with these packed ``records`` needs them no longer."""
        for packed in records.values():
            self._release(packed)

    def discard_all(self) -> None:
        """Give back whatever is left: all requests are answered, no more follow."""
        for packed in self._in_use.values():
            discard(packed, self._shared_folder)
        self._in_use.clear()

    def _pack(self, name: str, record: object) -> Packed:
        packed = self._find(record) or pack(record, self._shared_folder)
        self._use(packed)
        # What was packed last is in use too: the next request may be for the same.
        self._use(packed)
        _, before = self._latest.get(name, (None, None))
        self._latest[name] = (record, packed)
        if before is not None:
            self._release(before)
        return packed

    def _find(self, record: object) -> Packed | None:
        for latest, packed in self._latest.values():
            if is_same(latest, record):
                return packed
        return None

    def _use(self, packed: Packed) -> None:
        self._in_use[id(packed)] = packed
        self._num_users[id(packed)] += 1

    def _release(self, packed: Packed) -> None:
        self._num_users[id(packed)] -= 1
        if self._num_users[id(packed)] == 0:
            discard(self._in_use.pop(id(packed)), self._shared_folder)
