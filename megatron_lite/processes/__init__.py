"""The processes of a run: their start, their failures, and the work that one process does for its machine."""
