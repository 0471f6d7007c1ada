"""Megatron-Bridge itself asked what its bridges make of Megatron's names: one line with Hugging Face's.

python -m tests.bridge_registries JOBS.json      a list of {"bridge": class, "names": Megatron's}
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.bridge_oracle import REPLY, import_bridge


def answer(job: dict[str, Any]) -> dict[str, list[str] | None]:
    """The names of parts by Megatron's name; None for a name that the bridge doesn't know."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    found: dict[str, list[str] | None] = {}
    kinds = _all_below(MegatronModelBridge)
    bridge = next(each for each in kinds if each.__name__ == job["bridge"])()
    bridge.hf_pretrained = None  # bridges of experts ask it for the form of the stored experts
    registry = bridge.mapping_registry()
    for name in job["names"]:
        mapping = registry.megatron_to_hf_lookup(name)
        names = None if mapping is None else mapping.hf_param
        found[name] = (
            names if names is None else list(names.values()) if isinstance(names, dict) else [names]
        )
    return found


def _all_below(kind: Any) -> list[Any]:
    return [each for below in kind.__subclasses__() for each in (below, *_all_below(below))]


if __name__ == "__main__":
    import_bridge()
    __import__("megatron.bridge.models")
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print("\n" + REPLY + json.dumps(answer(each)), flush=True)
