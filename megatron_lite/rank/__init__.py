"""One rank's part of a run, as the engine uses it: its chunks of the model, its groups, the sums and results of a step."""
