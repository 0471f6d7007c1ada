"""Translates between Megatron's arguments and a model's configuration, in both directions."""
