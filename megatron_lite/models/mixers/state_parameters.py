"""Facts about the parameters of mixers with a state that their declarations and their modules share."""

CONVOLUTION = 4
"""Positions of Mamba 2's convolution, including the token's own."""
MAMBA_IN_FLOAT32 = frozenset({"A_log", "dt_bias", "D"})
"""Trained parameters that stay in float32, whatever the model's dtype: exponents magnify rounding."""
DELTA_NET_IN_FLOAT32 = frozenset({"A_log", "dt_bias"})
