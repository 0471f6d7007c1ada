"""Parallelism: the grid of ranks, communication and pipeline."""
