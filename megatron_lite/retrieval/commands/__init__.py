"""Commands of retrieval: `retro`, `embed`, `retrieve`."""
