"""Who computes which part: the grid of ranks, communication, pipeline, optimizer."""
