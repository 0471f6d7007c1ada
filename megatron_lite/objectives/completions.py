"""The number of completions that are generated at the same time. `plan` reads it without torch."""

MOST_ROWS = 64
"""Completions that a data-parallel rank generates at the same time."""
