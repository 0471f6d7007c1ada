"""Megatron's own shapes: arguments, names, layouts, optimizer; read and planned for `torch`, `torch_dist` and `zarr` alike."""
