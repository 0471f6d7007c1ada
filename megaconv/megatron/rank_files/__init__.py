"""Reads and plans `torch` checkpoints of core and legacy models, which have a directory for every rank."""
