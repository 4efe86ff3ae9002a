"""What a client keeps: who it is, its models, its memory, and what it serves."""
