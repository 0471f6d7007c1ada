"""Runs the command line for `python -m megaconv`."""

from megaconv.commands.cli import main

main()
