"""Reads and writes Megatron's optimizer state: finds the parameter of each tensor, and the inverse."""
