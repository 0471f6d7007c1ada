"""Describes a model: its configuration, its table of tensors, and its layout over ranks."""
