"""Tiny models of transformers with clear preferences, as generation sees them, and the model without layers of Megatron's fixture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lite.inference.slots import Recomputed
from tests.transformers_oracle import make_config, model_class

VOCAB, EOS, LENGTH = 131, 4, 96


def tiny(model_type: str = "llama", **settings: Any) -> Any:
    """A small model in float32. Its weights are large, so that the likeliest token leads by far more than
    rounding."""
    common = {
        "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "bos_token_id": 3, "eos_token_id": EOS, "pad_token_id": None,
        "tie_word_embeddings": False, "initializer_range": 0.2,
    }  # fmt: skip
    if model_type == "gpt2":
        common = {
            "n_embd": 64, "n_inner": 88, "n_layer": 4, "n_head": 8, "vocab_size": VOCAB, "n_positions": LENGTH,
            "bos_token_id": 3, "eos_token_id": EOS, "initializer_range": 0.2,
        }  # fmt: skip
    config = make_config(model_type, **common | settings)
    torch.manual_seed(7)
    model = model_class(config).from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def slots_of(model: Any, slots: int = 8) -> Recomputed:
    """A model of transformers, computed anew each time."""

    def logits(rows: Sequence[Sequence[int]]) -> list[Tensor]:
        with torch.no_grad():
            return [model(torch.tensor([list(row)])).logits[0].float() for row in rows]

    return Recomputed(logits, slots, LENGTH)


FIXTURE = Path(__file__).parents[1] / "fixtures" / "generate"


def without_layers() -> Recomputed:
    """Logits behind a token are (token's vector + half of that of the one before) . head + bias; id 0 lies before the first."""
    tables = {
        name: torch.from_numpy(values.astype(np.float32))
        for name, values in np.load(FIXTURE / "model.npz").items()
    }

    def logits(rows: Sequence[Sequence[int]]) -> list[Tensor]:
        found = []
        for row in rows:
            now, before = torch.tensor(list(row)), torch.tensor([0, *row[:-1]])
            hidden = tables["token"][now] + 0.5 * tables["before"][before]
            found.append(hidden @ tables["head"].t() + tables["bias"])
        return found

    return Recomputed(logits, 8, 1000)
