"""Checkpoints in object stores: their objects appear as files whose bytes are fetched when they are read."""
