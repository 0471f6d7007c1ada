"""Loaders: one file each, a checkpoint on disk opened as a source of canonical tensors. May use megaconv and formats."""
