"""The facts about a model that `GET /v1/models` tells, and that the page of the server shows."""

from typing import Any

from megaconv.planning.model_size import parameter_count
from megatron_lite.data.tokenizer import has_chat_template
from megatron_lite.inference.opening import Opened


def model_card(opened: Opened) -> dict[str, Any]:
    """Return the facts. `chat`: the tokenizer has a chat template. Numbers are texts for people."""
    config = opened.config
    facts = {
        "family": config.family,
        "parameters": f"{parameter_count(config):,}",
        "layers": str(config.layer_count),
        "hidden size": f"{config.hidden:,}",
        "vocabulary": f"{config.vocab:,}",
    }
    if config.experts.count:
        facts["experts"] = f"{config.experts.per_token} of {config.experts.count} for each token"
    return {**facts, "chat": has_chat_template(opened.tokenizer)}
