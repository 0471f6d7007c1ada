"""Drafts of families: a family's file made from a config.json, and from transformers' class for it."""
