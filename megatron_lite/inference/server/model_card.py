"""The facts about a model that `GET /v1/models` tells, and that the page of the server shows."""

from typing import Any

from megaconv.planning.model_size import parameter_count
from megatron_lite.data.tokenizer import has_chat_template
from megatron_lite.inference.gallery import NoImages
from megatron_lite.inference.generation_config import SAMPLED
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.sampling import PLAIN, Sampling


def model_card(opened: Opened) -> dict[str, Any]:
    """Return the facts. Numbers of the size are texts for people.

    `chat`: the tokenizer has a chat template. `images`: the model reads images in chats. `sampling`: that of requests which
    state none, if it isn't OpenAI's.
    """
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
    return {
        **facts,
        "chat": has_chat_template(opened.tokenizer),
        "images": not isinstance(opened.images, NoImages),
        "sampling": stated_sampling(opened.sampling),
    }


def stated_sampling(sampling: Sampling) -> dict[str, float]:
    """Return the settings of generation_config.json that change the sampling, by name."""
    values = {name: getattr(sampling, name) for name in SAMPLED}
    return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}
