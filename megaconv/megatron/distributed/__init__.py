"""Reads and plans `torch_dist` and `zarr` checkpoints."""
