"""torchtitan's tensor names for Llama. Release 0.3 changed two names of the earlier releases.

Since release 0.3, q, k and v of its Llama are one parameter (`fuse_qkv`). A checkpoint has three weights all the same, and
the state of the optimizer for the one parameter: [kv_heads, q's heads of a group + 2, head_dim, hidden].

Source: models/llama3/state_dict_adapter.py of torchtitan 0.2.2 and 0.3.0; FusedQKVLinear in models/common/attention.py.
"""

import re
from collections.abc import Collection

_HEAD, _HEAD_03 = "output.weight", "lm_head.weight"
_ATTENTION = re.compile(r"(layers\.\d+\.attention)\.(w(?:q|k|v|qkv)\.weight)")
_ATTENTION_03 = re.compile(r"(.*\blayers\.\d+\.attention)\.qkv_linear\.(w(?:q|k|v|qkv)\.weight.*)")
_EMBEDDING = "tok_embeddings.weight"


def since_03(name: str) -> str:
    """The name in release 0.3 and later of a tensor with an earlier name."""
    if name == _HEAD:
        return _HEAD_03
    found = _ATTENTION.fullmatch(name)
    return f"{found[1]}.qkv_linear.{found[2]}" if found else name


def before_03(name: str, names: Collection[str]) -> str:
    """The earlier name of a tensor that may have a later one. names: those of all tensors, which show the model."""
    if name.endswith(_HEAD_03):
        prefix = name.removesuffix(_HEAD_03)
        return prefix + _HEAD if prefix + _EMBEDDING in names else name
    found = _ATTENTION_03.fullmatch(name)
    return f"{found[1]}.{found[2]}" if found else name
