"""Runs the command line for `python -m megaconv`."""

from megaconv.commands.start import main

main()
