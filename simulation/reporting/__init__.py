"""Finished runs as tables, charts and one page to send around."""
