"""The commands of megaconv."""
