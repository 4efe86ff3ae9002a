"""``knnper store``: a client's memory on disk."""
