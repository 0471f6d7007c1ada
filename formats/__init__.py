"""File formats: the layout of bytes on disk, read as lazy tensors and written as planned files.

The package knows no naming schemes, and imports nothing else of this project.
"""
