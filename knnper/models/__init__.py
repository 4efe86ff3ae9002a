"""Models that embed and classify, and their flat weights."""
