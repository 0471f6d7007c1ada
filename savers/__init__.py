"""Savers: one module per format, which makes the complete plan of an output. Savers may import megaconv and formats."""
