"""The version of this installation."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("megaconv")
except PackageNotFoundError:  # run from a source tree that isn't installed
    __version__ = "0+source"
