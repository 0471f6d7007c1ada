"""A made-up model family, and a made-up file format for models of any family, as plugins of megaconv."""
