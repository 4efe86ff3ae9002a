"""Mechanisms of this project with canaries, for lower bounds on ε in one run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.private_answers import (
    MIN_VOTERS,
    PrivateAnswerSettings,
    noisy_votes,
)
from knnper.seeding import RandomKey
from knnper.server.private_training import PrivateRound, PrivateTraining
from knnper.server.rounds import untrained
from knnper.simulation.audit.figures import Scores
from knnper.simulation.audit.one_run import CanaryGame
from knnper.simulation.workbench import Workbench
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.records import ModelUpdate

_NUM_CANARIES = 500
_LARGEST_DELTA = 1e-5
_TIMES_CLIP_NORM = 2.0  # length of a canary's update, which is clipped


def private_training_game(bench: Workbench, num_rounds: int) -> CanaryGame | None:
    """Return the game of a run with client-level privacy; None without a claim.

    Each canary is a client that moves one weight, each canary another, by twice the
    clip norm. Its score is the sum of that weight's steps. Masks of secure aggregation
    would cancel, so there are none. The bound is at a δ of at most 1e-5: at the default
    δ, n^-1.1, of a run with few clients no number of right guesses would be evidence.
    """
    privacy, num_clients = bench.experiment.privacy, len(bench.roster.trainable())
    if privacy is None or not privacy.is_private:
        return None
    most = min(_NUM_CANARIES, bench.task.model.num_parameters)
    if privacy.noise_shares is not None:  # more clients would add more noise
        most = min(most, 2 * num_clients)
    method = bench.method
    if method.update_type is not ModelUpdate:
        return None

    def play(included: NDArray[np.bool_], rng: RandomKey) -> Scores:
        assembly = replace(bench, method=method, key=rng)
        training = PrivateTraining(assembly, num_clients)

        def updates(
            current: PrivateRound, chosen: Sequence[str]
        ) -> Iterator[tuple[str, Any]]:
            for name in chosen:
                if included[int(name)]:
                    weights = current.payload.weights.clone()
                    weights[int(name)] += _TIMES_CLIP_NORM * current.clip_norm
                    update = ModelUpdate(weights, 1, 0.0)
                    key = rng.child("update", current.server_round, name)
                    yield name, _processed(method, current.payload, update, key)

        canaries = [str(place) for place in range(len(included))]
        scores = np.zeros(len(included))
        state = untrained(bench, bench.roster).state
        clip_norm = privacy.clip_norm
        for server_round in range(1, num_rounds + 1):
            payload = method.broadcast(state, UNSEEN_CLIENT, rng)
            current = PrivateRound(training, payload, server_round, clip_norm)
            # All of them, unless the claim relies on sampling.
            chosen = training.selection.draw(canaries, len(canaries), server_round)
            mean = current.noisy_mean(updates(current, chosen))
            moved = method.aggregate(state, mean)
            steps = moved.weights - state.weights
            scores += steps[: len(included)].double().numpy()
            state = moved
            clip_norm = current.next_clip_norm() or clip_norm
        return scores

    claim = PrivateTraining(bench, num_clients)
    delta = min(claim.delta, _LARGEST_DELTA)
    return CanaryGame(
        surface="private training",
        num_canaries=most,
        play=play,
        epsilon=claim.epsilon_after(num_rounds, delta),
        delta=delta,
    )


def _processed(method: Method, payload: Any, update: Any, rng: RandomKey) -> Any:
    """Return an update as the method's processors at the client change it."""
    if not isinstance(method, UpdateProcessor):
        return update
    inner = _processed(method.method, payload, update, rng)
    sent = method.process(payload, inner, rng)
    return method.decoded(payload, sent)


def private_answers_game(settings: PrivateAnswerSettings) -> CanaryGame:
    """Return the game of a memory with private answers, in its worst case.

    Each canary is a stored example that alone votes on its own query, with cosine 1 and
    label 0. The query is repeated until the budget is spent, and the canary's
    score is the sum of the released scores of label 0 over their deviations, each
    weighted by the canary's contribution.
    """
    charge = settings.count_charge + 1 / (2 * MIN_VOTERS * settings.vote_noise**2)
    num_whole, rest = divmod(settings.budget / charge, 1.0)
    weights = [1.0] * int(num_whole) + [math.sqrt(rest)]

    def play(included: NDArray[np.bool_], rng: RandomKey) -> Scores:
        stored = np.flatnonzero(included)
        labels = np.zeros(len(stored), np.int64)
        spent = np.zeros(len(stored))
        cosines = np.eye(len(included), dtype=np.float32)[:, stored]
        generator = rng.numpy()
        scores = np.zeros(len(included))
        for weight in weights:
            votes = noisy_votes(cosines, labels, spent, 2, settings, generator)
            scores += weight * votes.scores[:, 0] / votes.deviations
            spent = votes.spent
        return scores

    return CanaryGame(
        surface="private answers",
        num_canaries=_NUM_CANARIES,
        play=play,
        epsilon=settings.epsilon,
        delta=settings.delta,
    )
