"""Names of commands, for the options that several of them have."""

CONVERT = ("convert",)
CONVERSIONS = ("convert", "merge")
"""Commands that write a checkpoint."""
READERS = ("inspect", "plan", "fingerprint", "verify", "diff")
"""Commands that open a checkpoint and write none."""
ONE_INPUT = ("inspect", "plan", "fingerprint", "verify")
"""Readers of one checkpoint."""
