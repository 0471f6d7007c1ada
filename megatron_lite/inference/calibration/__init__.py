"""`megatron-lite calibrate`: statistics of the inputs of matrices, and AWQ's search."""
