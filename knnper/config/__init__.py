"""Typed settings, seeding and errors."""
