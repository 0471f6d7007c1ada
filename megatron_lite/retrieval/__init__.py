"""Retrieval: embeddings of texts, their index, the search, and the neighbours of Retro."""
