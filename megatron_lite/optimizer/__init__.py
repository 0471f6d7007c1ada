"""The optimizer: gradients in buckets, the update of parameters, and state sharded over data-parallel ranks."""
