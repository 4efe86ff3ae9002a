"""Measured leakage: attacks on runs, updates and memories, with intervals."""
