"""Training data: Megatron's indexed files, the order of samples, and batches. Only the batches need torch."""
