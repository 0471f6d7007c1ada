"""Predicts the needs of a run before it starts: memory of each rank, bytes between ranks, and the pipeline bubble."""
