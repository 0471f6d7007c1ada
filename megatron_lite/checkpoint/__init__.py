"""Reading the checkpoint that a run starts from, and writing the checkpoints that a run saves."""
