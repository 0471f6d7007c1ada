"""Megatron's arguments, names, layouts and optimizer state, for `torch`, `torch_dist` and `zarr` alike."""
