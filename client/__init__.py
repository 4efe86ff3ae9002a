"""The client: train, evaluate, personalise; its durable state."""
