"""Loaders: one module per format, which opens a checkpoint on disk as a source of canonical tensors.

Loaders may import megaconv and formats.
"""
