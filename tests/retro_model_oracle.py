"""Retro by megatron-core 0.15.3, the last release with it, in an environment of its own: loads checkpoints, gives logits.

    python -m tests.retro_model_oracle tokens.npy neighbors.npy CHECKPOINT ...       writes CHECKPOINT.npy

The model is core's own RetroModel of local layers, built from the checkpoint's args, in one process on the CPU. Both
formats are loaded strictly.
"""

import sys
from pathlib import Path
from typing import Any

SIZES = {
    **{
        name: name
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    },
    "layernorm_epsilon": "norm_epsilon",
    "retro_chunk_length": "retro_chunk_length",
    "retro_num_neighbors": "retro_num_neighbors",
    "retro_num_retrieved_chunks": "retro_num_retrieved_chunks",
    "retro_encoder_num_layers": "retro_encoder_layers",
    "normalization": "normalization",
    "add_bias_linear": "add_bias_linear",
    "gated_linear_unit": "swiglu",
}
"""Field of core's configuration -> Megatron's argument."""


def build(args: Any) -> Any:
    """RetroModel as Megatron's pretrain_retro.py builds it from these args."""
    import torch
    from megatron.core.models.retro import RetroConfig, RetroModel, config
    from megatron.core.models.retro.decoder_spec import get_retro_decoder_block_spec

    config.is_te_min_version = lambda version: False  # it compares with None without TE
    made = RetroConfig(
        **{field: getattr(args, name) for field, name in SIZES.items()},
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=False, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
        retro_encoder_hidden_dropout=0.0, retro_encoder_attention_dropout=0.0, retro_split_preprocessing="98,2,0",
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    return RetroModel(
        made,
        get_retro_decoder_block_spec(made, use_transformer_engine=False),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
    )


def load(version: Path) -> Any:
    """The model with the weights of an iteration's directory, loaded strictly."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    files = list(version.glob("mp_rank_*/model_optim_rng.pt"))
    if files:
        (file,) = files
        state = torch.load(file, weights_only=False)
        model = build(state["args"])
        model.load_state_dict(state["model"], strict=True)
        return model
    args = dist_checkpointing.load_common_state_dict(str(version))["args"]
    model = build(args)
    state = dist_checkpointing.load(
        {"model": model.sharded_state_dict()}, str(version), strict=StrictHandling.RAISE_ALL
    )
    model.load_state_dict(state["model"], strict=True)
    return model


def logits(model: Any, tokens: Any, neighbors: Any) -> Any:
    """float32 [batch, sequence, vocabulary]. neighbors int64 [batch, chunks, neighbors, tokens]."""
    import torch

    ids, context = torch.from_numpy(tokens), torch.from_numpy(neighbors).flatten(0, 2)
    length, retrieved = ids.shape[1], context.shape[1]
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    with torch.no_grad():
        return model.eval()(
            ids, torch.arange(length).expand(len(ids), -1), mask,
            context_input_ids=context, context_position_ids=torch.arange(retrieved).expand(len(context), -1),
            context_mask=None,
        ).float()  # fmt: skip


def main(words: list[str]) -> None:
    import numpy as np
    import torch
    from megatron.core import parallel_state

    from tests.megatron_oracle import run_on_cpu

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tokens, neighbors = (np.load(word).astype(np.int64) for word in words[:2])
    with run_on_cpu():
        for place in map(Path, words[2:]):
            version = next(place.glob("iter_*"))
            np.save(
                place.with_name(f"{place.name}.npy"),
                logits(load(version), tokens, neighbors).numpy(),
            )


if __name__ == "__main__":
    main(sys.argv[1:])
