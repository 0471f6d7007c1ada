"""Patches: what changed between two checkpoints of a model, tensor by tensor, in any formats and layouts."""
