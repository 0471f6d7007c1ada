"""The mathematics of mixers with a state: pure functions, chunk by chunk. They know no layers and no parallelism."""
