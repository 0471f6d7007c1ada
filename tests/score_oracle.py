"""Megatron core's GPTModel with a head of scores in the place of its output layer, as trainers of critics and rewards put it
there: torch's own linear layer, which every tensor-parallel rank holds whole.

Source: LinearForLastLayer of verl, which all last stages get after GPTModel is built.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def replace_head(chunk: Any, checkpoint: Path) -> None:
    """Give a chunk a head of scores if the config.json beside the checkpoint names a class that has one."""
    file = checkpoint / "hf/config.json"
    described = json.loads(file.read_text()) if file.is_file() else {}
    (named,) = described.get("architectures") or [""]
    of_tokens = named.endswith("ForTokenClassification")
    if not chunk.post_process or not (of_tokens or named.endswith("ForSequenceClassification")):
        return
    labels = len(described.get("id2label") or "ab")
    chunk.output_layer = _head(chunk.config, labels, has_bias=of_tokens)


def _head(config: Any, labels: int, *, has_bias: bool) -> "torch.nn.Linear":
    import torch

    class Head(torch.nn.Linear):
        """GPTModel passes the weight of a tied head and the wish to gather, and expects a bias that was not added."""

        def forward(self, hidden: "torch.Tensor", **_: Any) -> Any:
            return super().forward(hidden).float(), None

    return Head(config.hidden_size, labels, bias=has_bias, dtype=config.params_dtype)
