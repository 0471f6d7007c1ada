"""A running conversion: the stream, its workers, and the plan that they follow."""
