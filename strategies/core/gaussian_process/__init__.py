"""Gaussian-process classification: a tree of binary processes over the classes."""
