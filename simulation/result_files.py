"""The files that tell how much of a piece of work is done."""

RESULT_FILES = ("results.json", "rounds.jsonl", "failed.txt", "parts.jsonl")
"""One of them is there, or grows, as soon as a run, a round or a part is done."""
