"""The server: rounds, aggregation, checkpoints, model distribution."""
