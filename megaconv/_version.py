"""The version, which pyproject.toml takes from here: looking it up among installed packages takes longer than reading this."""

__version__ = "0.1.0"
