"""A conversion while it runs: the stream, its workers, the plan they follow."""
