"""What can go wrong with a client's state folder."""

from knnper.config.errors import KnnPerError


class ResidenceError(KnnPerError):
    """A client's state folder is another's, is damaged, or holds nothing to serve."""
