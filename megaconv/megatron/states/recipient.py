"""The software that an output is for: Megatron-LM, or Megatron-Bridge if an option asks for it.

Megatron-LM reads args. Megatron-Bridge reads torch_dist alone, with a run_config.yaml beside it, and builds all models as
GPTModel.
"""

from megaconv.errors import UsageError
from megaconv.options import SaveOptions

FOR = "for"
"""The saver's option for other software than Megatron-LM."""
BRIDGE = "megatron-bridge"


def is_for_bridge(options: SaveOptions) -> bool:
    """True if the output is for Bridge.

    Raises UsageError for an unknown value, or for a format that Bridge doesn't read.
    """
    word = options.extra.get(FOR)
    if word is None:
        return False
    if word != BRIDGE:
        raise UsageError(
            f"--option {FOR}={word}: is not known; choose {BRIDGE}, or leave it out for Megatron-LM"
        )
    if options.ckpt_format != "torch_dist":
        raise UsageError(
            f"--option {FOR}={BRIDGE}: Megatron-Bridge reads torch_dist alone; give --ckpt-format torch_dist"
        )
    return True
