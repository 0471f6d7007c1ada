"""The ways to store a row's tensors in a naming scheme: one file and one class for each."""
