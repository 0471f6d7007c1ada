"""A chunk of any model, by its description."""

from megaconv.model.layout import Chunk
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.encoder_decoder import EncoderDecoderChunk
from megatron_lite.models.plan import Plan

AnyChunk = ModelChunk | EncoderDecoderChunk


def make_chunk(plan: Plan, chunk: Chunk) -> AnyChunk:
    return EncoderDecoderChunk(plan, chunk) if plan.config.encoder.layers else ModelChunk(plan, chunk)
