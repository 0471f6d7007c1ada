"""Megatron's arguments and a model's configuration, both ways."""
