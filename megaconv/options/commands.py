"""Names of commands, for the options that several of them have."""

CONVERT = ("convert", "apply")
CONVERSIONS = ("convert", "merge", "average", "apply")
"""Commands that write a checkpoint."""
WRITERS = (*CONVERSIONS, "delta")
"""Commands that write a checkpoint or a patch."""
SERVE = ("serve_hf",)
"""The command that serves checkpoints which it plans as a conversion."""
READERS = ("inspect", "plan", "fingerprint", "verify", "diff", "delta", "seal")
"""Commands that open a checkpoint and convert none."""
ONE_INPUT = ("inspect", "plan", "fingerprint", "verify", "seal")
"""Readers of one checkpoint."""
