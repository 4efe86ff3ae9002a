"""Data sets as memory-mapped arrays, and what a client holds of them."""
