"""The views of `megaconv inspect`, one file per view, each for people and for programs."""
