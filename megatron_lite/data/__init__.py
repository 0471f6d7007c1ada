"""Training data: Megatron's indexed files, the order in which samples are read, batches. Nothing here needs torch but the batches."""
