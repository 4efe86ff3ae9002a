"""Predictions of one client over HTTP, from its model and its memory."""
