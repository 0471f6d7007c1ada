"""A pretended GPU: tensors on `cuda:0` that a CPU computes. The rules and costs of a real GPU are checked."""
