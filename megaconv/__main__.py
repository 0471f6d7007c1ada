"""`python -m megaconv`."""

from megaconv.commands.cli import main

main()
