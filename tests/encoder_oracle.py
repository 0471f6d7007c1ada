"""BERT and T5 of Megatron core for tests/megatron_oracle.py: built from args alone, as pretrain_bert.py and pretrain_t5.py do.

Questions are dictionaries of int64 tensors: input_ids [batch, sequence], with attention_mask and token_type_ids (BERT) or
decoder_input_ids (T5). A BERT answers with a pair: logits, and those of its binary head [batch, 2] or nothing.
"""

from argparse import Namespace
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.T5 import T5Model
    from megatron.core.transformer import TransformerConfig


def is_bert(args: Namespace) -> bool:
    """True for a BERT, by the user's own arguments: only pretrain_bert.py takes this spec for local layers."""
    return getattr(args, "spec", None) == ["local"]


def is_t5(args: Namespace) -> bool:
    return args.decoder_num_layers is not None


def build_bert(
    args: Namespace, config: "TransformerConfig", virtual_stage: int | None
) -> "BertModel":
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config=config,
        num_tokentypes=2 if args.bert_binary_head else 0,
        add_binary_head=args.bert_binary_head,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=virtual_stage
        ),
        post_process=parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=virtual_stage
        ),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=virtual_stage,
    ).eval()


def build_t5(args: Namespace, config: "TransformerConfig") -> "T5Model":
    """Its decoder has num_layers: pretrain_t5.py looks at no other number."""
    from megatron.core.models.T5 import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    encoder_config = deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers
    return T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(
            args.encoder_num_layers
        ),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(args.num_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
    ).eval()


def call_arguments(asked: Mapping[str, "torch.Tensor"]) -> tuple[Any, ...]:
    """The arguments of forward(). Masks are true at positions that must not be seen."""
    import torch

    tokens = asked["input_ids"]
    if "decoder_input_ids" not in asked:
        return tokens, asked["attention_mask"], asked["token_type_ids"]
    decoder = asked["decoder_input_ids"]
    batch, sequence, length = len(tokens), tokens.shape[1], decoder.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).triu(1).expand(batch, 1, length, length)
    everything = torch.zeros(batch, 1, sequence, sequence, dtype=torch.bool)
    return (
        tokens,
        decoder,
        everything,
        causal,
        torch.zeros(batch, 1, length, sequence, dtype=torch.bool),
    )
