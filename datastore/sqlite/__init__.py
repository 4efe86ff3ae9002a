"""The durable truth of a store: one SQLite database."""
