"""The forms in which models write calls of tools: one file for each, `table.py` for all."""
