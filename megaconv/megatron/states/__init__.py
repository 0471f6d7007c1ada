"""What rank files hold, by name."""
