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


def as_aligner(chunks: list[Any]) -> None:
    """Give NeMo-Aligner's form to a model with a head of scores: it has the head `rm_head`, a RowParallelLinear, beside the
    output layer for words. Source: GPTRewardModel."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for chunk in (each for each in chunks if each.post_process):
        ours, config = chunk.output_layer, chunk.config
        settings = {"config": config, "init_method": config.init_method, "skip_bias_add": False}
        chunk.rm_head = RowParallelLinear(
            config.hidden_size,
            ours.out_features,
            bias=True,
            input_is_parallel=False,
            **settings,
        )
        share = ours.weight.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim=1)
        with torch.no_grad():
            chunk.rm_head.weight.copy_(share[parallel_state.get_tensor_model_parallel_rank()])
            chunk.rm_head.bias.copy_(ours.bias)
        chunk.output_layer = ColumnParallelLinear(
            config.hidden_size, chunk.vocab_size, bias=False, **settings
        )


def _head(config: Any, labels: int, *, has_bias: bool) -> "torch.nn.Linear":
    import torch

    class Head(torch.nn.Linear):
        """GPTModel passes the weight of a tied head and the wish to gather, and expects a bias that was not added."""

        def forward(self, hidden: "torch.Tensor", **_: Any) -> Any:
            return super().forward(hidden).float(), None

    return Head(config.hidden_size, labels, bias=has_bias, dtype=config.params_dtype)
