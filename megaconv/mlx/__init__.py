"""MLX, Apple's framework: the names, the settings and the values of the models that mlx-lm saves."""
