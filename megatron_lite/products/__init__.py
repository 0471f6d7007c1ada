"""Products of activations with a matrix, in the dtype of the tensors or in FP8."""
