"""Class-balancing reservoir sampling.

Chrysakis, Moens, "Online Continual Learning from Imbalanced Data", ICML 2020,
Algorithm 1 (CBRS).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from datastore.contents import Contents
from datastore.policy.base import Decision, StreamState
from datastore.policy.chance import draw_below
from datastore.policy.members import Members
from datastore.policy.outcome import all_but, required_capacity
from knnper.config.seeding import RandomKey


class ClassBalancedPolicy:
    """Keeps the labels as equal in number as the stream allows.

    In a full store, a label that has the most examples, or ever had, is full. An
    arrival of another label replaces a random example of the largest labels. One of a
    full label c, of which m_c are stored and n_c were seen, is kept with probability
    m_c / n_c and then replaces a random one of its own: within a label the sample is
    uniform.

    User deletions: see `datastore.policy.deletion.forget`.
    """

    needs_capacity: ClassVar[bool] = True

    def decide(
        self,
        stored: Contents,
        arriving: Contents,
        state: StreamState,
        capacity: int | None,
        key: RandomKey,
    ) -> Decision:
        """Decide as `datastore.policy.base.Policy` says.

        Raises
        ------
        ValueError
            If there is no capacity.
        """
        capacity = required_capacity("class_balanced", capacity)
        num_taken = min(max(capacity - len(stored), 0), len(arriving))
        run = _Run(stored, arriving, state, num_taken)
        if len(run.members) >= capacity:
            run.mark_largest()
        gone = list(run.replaced(key))
        decision = all_but(gone, stored, arriving, state)
        marked = replace(decision.state, was_largest=run.was_largest)
        return replace(decision, state=marked)


class _Run:
    """One batch; the first ``num_taken`` of it find free places."""

    def __init__(
        self, stored: Contents, arriving: Contents, state: StreamState, num_taken: int
    ) -> None:
        labels = np.concatenate([stored.labels, arriving.labels])
        self._labels: list[int] = arriving.labels.tolist()
        self._num_stored, self._num_taken = len(stored), num_taken
        self._num_offered = state.num_offered
        taken = np.bincount(labels[len(stored) :][:num_taken], minlength=0)
        self._num_seen = state.num_seen.copy()
        self._num_seen[: len(taken)] += taken
        self.was_largest = state.was_largest.copy()
        self.members = Members(
            labels[: len(stored) + num_taken], num_classes=len(state.num_seen)
        )

    def mark_largest(self) -> None:
        """Note which labels have the most examples."""
        self.was_largest[self.members.largest()] = True

    def replaced(self, key: RandomKey) -> Iterator[int]:
        """Yield, for each arrival at the full store, the position that is not kept."""
        for arrival in range(self._num_taken, len(self._labels)):
            label = self._labels[arrival]
            self._num_seen[label] += 1
            yield self._replaced_by(
                self._num_stored + arrival,
                label,
                key.child(self._num_offered + arrival + 1),
            )

    def _replaced_by(self, position: int, label: int, key: RandomKey) -> int:
        if self.was_largest[label]:
            drawn = draw_below(int(self._num_seen[label]), key)
            if drawn >= self.members.count(label):
                return position
            gone = self.members.pop(label, drawn)
            self.members.append(label, position)
            return gone
        gone = self._pop_of_largest(key)
        self.members.append(label, position)
        self.mark_largest()
        return gone

    def _pop_of_largest(self, key: RandomKey) -> int:
        largest = self.members.largest()
        count = self.members.count(largest[0])
        which, drawn = divmod(draw_below(count * len(largest), key), count)
        return self.members.pop(largest[which], drawn)
