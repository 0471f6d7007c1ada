"""Known architectures that no family can represent, each with the reason.

Architectures that are neither here nor in a family are unknown. Both are refused, these with their reason.
"""

_REASONS: dict[str, tuple[str, ...]] = {
    "its language model attends to a prompt in both directions, and Megatron core attends to earlier tokens only": (
        "PaliGemmaForConditionalGeneration",
    ),
    "its vision encoder (RADIO) is in no transformers release; its language model, a Nemotron-H, has no text_config": (
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    ),
    "its files have LoRA matrices for images and speech inside, for Microsoft's own class; give the model's files for transformers' class "
    "Phi4MultimodalForCausalLM": ("Phi4MMForCausalLM",),
    "its head classifies tokens instead of predicting the next one": (
        "Qwen3_5ForTokenClassification",
    ),
}


def _by_architecture() -> dict[str, str]:
    found = {}
    for reason, architectures in _REASONS.items():
        found.update(dict.fromkeys(architectures, reason))
    return found


UNSUPPORTED = _by_architecture()
"""Architecture -> the reason why no family can represent it."""
