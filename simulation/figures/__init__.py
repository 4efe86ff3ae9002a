"""Figures of the papers: from a finished run, or from an experiment of their own."""
