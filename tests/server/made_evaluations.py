"""Evaluations of nothing that was ever predicted."""

from knnper.strategies.core.predictors import NUM_CALIBRATION_BINS, Evaluation


def evaluation(total: int, correct: int) -> Evaluation:
    """Return an evaluation in which nothing was predicted with any confidence."""
    rest = (0,) * (NUM_CALIBRATION_BINS - 1)
    none = (0.0,) * NUM_CALIBRATION_BINS
    return Evaluation(total, correct, 0.0, (total, *rest), none, (correct, *rest))
