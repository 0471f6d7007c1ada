"""`torch` checkpoints: a directory for every rank; core and legacy."""
