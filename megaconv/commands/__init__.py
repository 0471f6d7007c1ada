"""What a user asks for on the command line."""
