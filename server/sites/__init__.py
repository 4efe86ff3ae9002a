"""Clients with data of their own, each behind a node of its own."""
