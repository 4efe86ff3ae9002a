"""The papers' figures and tables, made with ``python -m papers``."""
