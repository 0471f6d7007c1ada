"""What a run starts from and what it saves."""
