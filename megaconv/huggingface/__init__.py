"""A Hugging Face directory: its weight files, and the description of quantized values in its config.json."""
