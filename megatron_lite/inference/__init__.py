"""Inference: generation, scoring, chat, evaluation and a server."""
