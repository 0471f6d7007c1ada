"""`python -m megaconv`."""

from megaconv.cli import main

main()
