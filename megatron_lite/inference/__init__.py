"""A model in use: what it says next, how sure it was, and everything that is built on that."""
