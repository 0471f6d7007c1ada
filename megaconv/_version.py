"""The version. pyproject.toml reads it from here: a look-up among installed packages takes longer than this import."""

__version__ = "0.1.0"
