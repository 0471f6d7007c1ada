"""Settings of Retro: the model's retrieval, and the project directory with its data."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Retro:
    """Retro: layers that attend to retrieved text"""

    retro_project_dir: str | None = flag(
        None,
        "project of `megatron-lite retro build` or of Megatron: data, tokenizer, lengths and neighbors",
        samples=True,
    )
    retro_add_retriever: bool = flag(
        False, "add retrieval to the model; without it, the same data train a GPT"
    )
    retro_chunk_length: int | None = flag(None, "tokens of a chunk (default: the project's)")
    retro_encoder_layers: int = flag(2, "layers of the encoder of neighbors")
    retro_num_neighbors: int = flag(2, "neighbors of each chunk", samples=True)
    retro_num_retrieved_chunks: int = flag(
        2, "chunks of a neighbor: the retrieved one and those that follow it", samples=True
    )
    retro_no_final_norm: bool = flag(
        False, "a new model without a norm after its last layer, as Megatron core 0.8 and newer"
    )
    retro_encoder_hidden_dropout: float = flag(0.1, "hidden dropout in the encoder")
    retro_encoder_attention_dropout: float = flag(0.1, "attention dropout in the encoder")
    retro_attention_gate: float = flag(
        1.0, "factor on cross attention; 0: neither computed nor trained, as InstructRetro tunes"
    )
    retro_megatron_neighbors: bool = flag(
        False,
        "neighbors as Megatron: a continuation goes on in the next document, and a missing one is the last chunk",
        samples=True,
    )


OF_MODEL = (
    "retro_add_retriever",
    "retro_chunk_length",
    "retro_encoder_layers",
    "retro_num_neighbors",
    "retro_num_retrieved_chunks",
)
"""The settings that describe the model, with the names of Megatron's arguments."""
