"""Every flag once, and whether they fit each other."""
