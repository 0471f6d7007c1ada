"""The content of rank files by name."""
