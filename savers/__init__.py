"""Savers: one file each, the complete plan of an output. May use megaconv and formats."""
