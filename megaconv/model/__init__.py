"""The description of a model, its table of tensors, its layout over ranks."""
