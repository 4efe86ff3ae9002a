"""What all methods share: their shape, the local loop, means."""
