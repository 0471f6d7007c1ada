"""What `megaconv inspect` can show: a view a file, each for people and for programs."""
