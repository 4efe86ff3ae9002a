"""The server: rounds, aggregation, checkpoints, hand-over."""
