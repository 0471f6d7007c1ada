"""Arithmetic on the values of tensors: casts, rounding, quantized and shifted forms. All of them are lazy tensors."""
