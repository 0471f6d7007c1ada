"""Falcon Mamba: Mamba 1 with norms without weights on the narrow time step, B and C.

Source: FalconMambaConfig and modeling_falcon_mamba.py of transformers 5.23.
"""

from dataclasses import replace

from megaconv.families.mamba import FAMILY as MAMBA
from megaconv.families.parts.keys import number

FAMILY = replace(
    MAMBA, name="falcon_mamba", architectures=("FalconMambaForCausalLM",), model_type="falcon_mamba",
    keys=(*MAMBA.keys, number("mixer_rms_eps", "mamba1.norm_epsilon", 1e-6)), fixed={**MAMBA.fixed, "mamba1.norms": "bare"},
)  # fmt: skip
