"""The work of `megaconv verify A [B] --forward`: opens the checkpoints, chooses the tokens, and computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from formats.tensor import LazyTensor
from megaconv.commands.forward_pass import ForwardPass, ForwardRequest, Report
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header
from megaconv.options import LoadOptions
from megatron_lite.checkpoint.restore import open_language_model
from megatron_lite.data.beside import tokenizer_of
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.forward.comparison import compute, require_comparable
from megatron_lite.forward.opening import open_streamed, torch_dtype
from megatron_lite.forward.rows import (
    BUILT_IN,
    WINDOW,
    batches,
    built_in_tokens,
    rows_together,
    windows,
)
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.purposes import refuse_scores


@dataclass(frozen=True)
class _Opened:
    """A checkpoint of the request."""

    place: str
    header: Header
    tensors: dict[str, LazyTensor]

    @property
    def config(self) -> ModelConfig:
        return self.header.config


def verify(request: ForwardRequest, report: Report) -> ForwardPass:
    """Compute one or two models. Raises CheckpointError; NotExpressible for a model that the trainer can't compute."""
    dtype = torch_dtype(request.dtype)
    opened = [
        _open(place, loader, request.load)
        for place, loader in zip(request.places, request.loaders, strict=True)
    ]
    first, *others = opened
    for other in others:
        require_comparable(
            (first.place, first.config),
            (other.place, other.config),
            common_tokens=request.common_tokens,
        )
    rows = _rows(request, opened)
    longest = max(map(len, rows))
    engines = [_engine(each, dtype, request.max_memory, longest) for each in opened]
    vocabularies = [each.config.vocab for each in opened]
    largest = max(opened, key=lambda each: each.config.vocab).config
    passes = passes_of(largest, rows, engines[0].dtype.itemsize, request.max_memory)
    at_once = _logits_at_once(largest, request.max_memory)
    compared = min(vocabularies) if len(set(vocabularies)) > 1 else None
    computed = compute(engines, passes, at_once, report, compared)
    return ForwardPass(
        request,
        families=[each.config.family for each in opened],
        tokens=sum(map(len, rows)),
        predicted=computed.losses[0].count,
        perplexities=[losses.perplexity for losses in computed.losses],
        differences=list(computed.differences.values()),
        vocabularies=vocabularies,
    )


def passes_of(
    config: ModelConfig, rows: Sequence[tuple[int, ...]], itemsize: int, max_memory: int
) -> list[Microbatch]:
    """Return the rows in batches whose activations and logits fit into memory. itemsize: bytes of an activation."""
    longest = max(map(len, rows))
    together = min(
        rows_together(config, longest, itemsize, max_memory),
        _logits_at_once(config, max_memory),  # at least one token of each row has logits
    )
    return list(batches(config, rows, together))


def _logits_at_once(config: ModelConfig, max_memory: int) -> int:
    """Return the number of tokens whose logits, with copies in float64, take an eighth of the memory; at least 1."""
    return max(1, max_memory // 8 // (4 * 4 * config.vocab))


def _open(place: str, loader: str | None, options: LoadOptions) -> _Opened:
    """Open a checkpoint; of a multimodal model the language model."""
    source = open_language_model(place, loader, options)
    refuse_scores(source.header.config, place)
    tensors = {key.name: tensor for key, tensor in source.tensors() if key.slot == WEIGHT}
    return _Opened(place, source.header, tensors)


def _engine(opened: _Opened, dtype: str, max_memory: int, length: int) -> Engine:
    place, config, tensors = opened.place, opened.config, opened.tensors
    return open_streamed(place, config, tensors, dtype, torch.device("cpu"), max_memory, length)


def _rows(request: ForwardRequest, opened: Sequence[_Opened]) -> list[tuple[int, ...]]:
    """Return the rows of tokens, which all models have. Raises UsageError."""
    opened = sorted(opened, key=lambda each: each.config.vocab)
    config = opened[0].config
    shortest = min(opened, key=lambda each: each.config.max_positions)
    most = shortest.config.max_positions
    window = request.window or min(most, BUILT_IN if request.text is None else WINDOW)
    if window > most:
        raise UsageError(f"--window {window}: {shortest.place} has {most} positions; pass fewer")
    if request.text is None:
        return [built_in_tokens(config.vocab, window)]
    if config.has("both_ways") or config.encoder.layers:
        raise UsageError(
            f"--text: a {config.family} doesn't predict the next token of a text; leave it out"
        )
    rows = windows(_tokens(request.text, opened), window)
    if not rows:
        raise UsageError(
            f"--text {request.text}: has fewer than two tokens, so nothing is predicted"
        )
    return rows


def _tokens(path: Path, opened: Sequence[_Opened]) -> list[int]:
    """Return the tokens of a text file, with the tokens that the model expects before a text."""
    tokenizer = _tokenizer(opened)
    try:
        text = path.read_text(encoding="utf-8")
        tokens = [*tokenizer.begin, *tokenizer.tokenize(text)]
    except OSError as error:
        raise UsageError(f"--text {path}: can't be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"--text {path}: can't be tokenized: {error}") from error
    largest, vocab = max(tokens, default=0), opened[0].config.vocab
    if largest >= vocab:
        raise UsageError(
            f"--text {path}: the tokenizer has a token {largest}, the model's vocabulary has {vocab:,}"
        )
    return tokens


def _tokenizer(opened: Sequence[_Opened]) -> Tokenizer:
    for each in opened:
        found = tokenizer_of(each.header)
        if found is not None:
            return found
    places = " or ".join(each.place for each in opened)
    raise UsageError(
        f"--text: there is no tokenizer beside {places}; pass --config with a Hugging Face directory that has one"
    )
