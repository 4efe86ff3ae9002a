"""Flower's SuperLink with a gateway in front of it, and who may connect."""
