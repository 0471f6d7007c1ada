"""The optimizer's tensors: whose they are, and the way back."""
