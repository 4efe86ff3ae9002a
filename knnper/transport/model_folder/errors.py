"""What can go wrong with a global model."""

from knnper.config.errors import KnnPerError


class ModelError(KnnPerError):
    """A global model is missing, damaged, or not the one that was expected."""
