"""Rows, keys and rules that several families share, one file for each subject. Nothing here imports a family."""
