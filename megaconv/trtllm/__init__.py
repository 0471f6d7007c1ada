"""TensorRT-LLM's own checkpoints: the names of tensors, the configuration, and the scales of FP8."""
