"""`torch_dist` and `zarr` checkpoints."""
