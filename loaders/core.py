"""Megatron core in `torch` format: rank directories, any tensor, pipeline and virtual-pipeline parallel layout."""

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats import rank_files, torch_zip
from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor
from megaconv.assembled import Placed, assemble
from megaconv.check import same_names
from megaconv.config import STRUCTURE, ModelConfig
from megaconv.errors import TensorMismatch, UnknownFamily, UnknownFormat, UsageError
from megaconv.families import family, family_of_hf
from megaconv.hf_config import CONFIG_NAME, load_config
from megaconv.ir import Header, OpenedSource, TrainingState, describe, main_dtype
from megaconv.layout import Chunk, Layout
from megaconv.megatron_args import from_arguments, true_vocab
from megaconv.megatron_names import EXTRA_STATE, NOT_PARAMETERS, naming_of
from megaconv.options import LoadOptions
from megaconv.sidecars import SIDECAR_DIRECTORY, find_sidecars
from megaconv.table import canonical_shapes, native_tensors

DESCRIPTION = "Megatron core, torch format: iter_*/mp_rank_*/model_optim_rng.pt"

_log = logging.getLogger("megaconv")
_Weights = dict[str, LazyTensor]


@dataclass(frozen=True)
class _Ranks:
    """All rank files of one iteration, their weights by (tensor rank, pipeline rank), a dictionary per virtual stage."""

    tp: int
    pp: int
    ep: int
    states: Mapping[tuple[int, int], Mapping[str, Any]]
    weights: Mapping[tuple[int, int], list[_Weights]]
    files: Mapping[tuple[int, int], str]


def detect(path: Path) -> bool:
    version = rank_files.find_version(path)
    return version is not None and rank_files.is_rank_files(version)


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a checkpoint that is incomplete, contradicts itself, or is of no known family."""
    version = rank_files.find_version(path)
    if version is None or not rank_files.is_rank_files(version):
        raise UnknownFormat(f"{path}: holds no Megatron checkpoint in torch format")
    listing = rank_files.read(version)
    ranks = _read_ranks(listing, first_tp_rank_only=options.metadata_only)
    first = ranks.states[0, 0]
    args = first.get("args")
    if not isinstance(args, Namespace):
        raise CorruptCheckpoint(f"{ranks.files[0, 0]}: has no args; Megatron writes them into every rank file")
    layout = _layout(ranks, args)
    sidecars = options.config or (version.parent / SIDECAR_DIRECTORY)
    config = _configure(ranks, layout, args, sidecars, required=options.config is not None)
    padded = _padded_rows(ranks)
    config = replace(config, vocab=_vocab(options, config, args, padded, layout.tp))
    tensors = assemble(
        canonical_shapes(family(config.family).rows, config), _place(ranks, layout, config, padded), strict=False
    )
    manifest = describe(tensors)
    header = Header(
        config=replace(config, dtype=main_dtype(manifest)),
        manifest=manifest,
        layout=layout,
        training=_training(listing, first, args),
        files=find_sidecars(sidecars),
        vocab_divisor=getattr(args, "make_vocab_size_divisible_by", None),
        source=f"core, torch format, {'Transformer Engine' if _naming(ranks) == 'core' else 'local'} names",
        padded_vocab=padded,
        has_optimizer="optimizer" in first
        or (listing.files[min(listing.files)].parent / rank_files.OPTIMIZER_FILE).exists(),
    )
    return OpenedSource(header, {} if options.metadata_only else tensors)


# Files to ranks.


def _read_ranks(listing: rank_files.RankFiles, *, first_tp_rank_only: bool) -> _Ranks:
    """first_tp_rank_only: take tensor rank 0's files for those of all others, which have the same names and shapes."""
    read = {numbers: (0, *numbers[1:]) if first_tp_rank_only else numbers for numbers in listing.files}
    opened = {
        numbers: _read_state(listing.files[numbers]) for numbers in sorted(set(read.values()) & set(listing.files))
    }
    states = {numbers: opened[source] for numbers, source in read.items() if source in opened}
    weights = {numbers: _chunks(state, listing.files[numbers]) for numbers, state in states.items()}
    tp, pp, ep = _grid(listing, weights)
    chosen = {}
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            numbers = (tp_rank, *((pp_rank,) if pp > 1 else ()), *((0,) if ep > 1 else ()))
            if numbers not in states:
                raise CorruptCheckpoint(
                    f"{listing.directory}: there is no rank directory for tensor rank {tp_rank}, pipeline rank {pp_rank}; "
                    f"the checkpoint has tp={tp}, pp={pp}"
                )
            chosen[tp_rank, pp_rank] = numbers
    return _Ranks(
        tp, pp, ep,
        {rank: states[numbers] for rank, numbers in chosen.items()},
        {rank: weights[numbers] for rank, numbers in chosen.items()},
        {rank: f"{listing.files[numbers].parent.name}/{listing.files[numbers].name}" for rank, numbers in chosen.items()},
    )  # fmt: skip


def _read_state(path: Path) -> Mapping[str, Any]:
    state = torch_zip.read(path)
    if not isinstance(state, dict) or not ("model" in state or "model0" in state):
        raise CorruptCheckpoint(
            f"{path}: holds no model; a rank file is a dictionary with the key model (or model0, model1 ...)"
        )
    return state


def _chunks(state: Mapping[str, Any], path: Path) -> list[_Weights]:
    """The parameters of each virtual stage."""
    keys = (
        ["model"]
        if "model" in state
        else sorted((key for key in state if key[:5] == "model" and key[5:].isdigit()), key=lambda key: int(key[5:]))
    )
    chunks = []
    for key in keys:
        model = state[key]
        if isinstance(model, dict) and "language_model" in model:
            raise UnknownFormat(
                f"{path}: is a legacy Megatron checkpoint (its model has a language_model); only Megatron core's can be read"
            )
        if not isinstance(model, dict):
            raise CorruptCheckpoint(f"{path}: {key} should be a dictionary of tensors, found {type(model).__name__}")
        chunks.append(dict(_parameters(model, path)))
    return chunks


def _parameters(model: Mapping[str, Any], path: Path) -> Iterator[tuple[str, LazyTensor]]:
    for name, value in model.items():
        bare = name.removeprefix("module.")
        if bare.endswith(EXTRA_STATE):
            if sum(getattr(value, "shape", ())):
                _log.warning("%s: %s holds FP8 scales, which are left out", path, bare)
        elif bare not in NOT_PARAMETERS:
            if not hasattr(value, "read_into"):
                raise CorruptCheckpoint(f"{path}: {name} should be a tensor, found {value!r:.60}")
            yield bare, value


def _grid(listing: rank_files.RankFiles, weights: Mapping[tuple[int, ...], list[_Weights]]) -> tuple[int, int, int]:
    """(tp, pp, ep). Of two numbers the second counts expert ranks when rank 0 holds the end of the model already."""
    sizes = [1 + max(column) for column in zip(*weights, strict=True)]
    if len(sizes) == 1:
        return sizes[0], 1, 1
    if len(sizes) == 3:
        return sizes[0], sizes[1], sizes[2]
    first = min(weights)
    if any(name.startswith(("decoder.final_layernorm", "output_layer")) for name in weights[first][-1]):
        return sizes[0], 1, sizes[1]
    return sizes[0], sizes[1], 1


# Ranks to layout and configuration.


def _layout(ranks: _Ranks, args: Namespace) -> Layout:
    vpp = max(len(chunks) for chunks in ranks.weights.values())
    counts = []
    for vpp_rank in range(vpp):
        for pp_rank in range(ranks.pp):
            chunks = ranks.weights[0, pp_rank]
            counts.append(_layer_count(chunks[vpp_rank]) if vpp_rank < len(chunks) else 0)
    expected = getattr(args, "num_layers", None)
    if expected is not None and sum(counts) != expected:
        raise TensorMismatch(
            f"the rank files hold {sum(counts)} layers ({'+'.join(map(str, counts))}), their args say {expected}; is a stage missing?"
        )
    return Layout(ranks.tp, ranks.pp, vpp, ranks.ep, stage_layers=tuple(counts))


def _layer_count(weights: _Weights) -> int:
    return 1 + max((int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers.")), default=-1)


def _naming(ranks: _Ranks) -> str:
    return naming_of(name for chunks in ranks.weights.values() for chunk in chunks for name in chunk)


def _configure(ranks: _Ranks, layout: Layout, args: Namespace, directory: Path, *, required: bool) -> ModelConfig:
    """From config.json where there is one, else from args; either has to agree with the tensors."""
    found = _found(ranks, layout, args)
    if not required and not (directory / CONFIG_NAME).is_file():
        return from_arguments(args, found)
    raw = load_config(directory / CONFIG_NAME)
    config = family_of_hf(raw, str(directory / CONFIG_NAME)).read_hf(raw)
    described = found | {"heads": args.num_attention_heads} if hasattr(args, "num_attention_heads") else found
    for name in STRUCTURE:
        if name in described and getattr(config, name) != described[name]:
            raise TensorMismatch(
                f"{directory / CONFIG_NAME}: says {name} = {getattr(config, name)}, the checkpoint has {described[name]}; "
                "it describes another model"
            )
    return config


def _found(ranks: _Ranks, layout: Layout, args: Namespace) -> dict[str, Any]:
    """What the tensors say, as fields of ModelConfig."""
    chunks = [chunk for weights in ranks.weights.values() for chunk in weights]
    layer = next((chunk for chunk in chunks if "decoder.layers.0.mlp.linear_fc2.weight" in chunk), None)
    if layer is None or "embedding.word_embeddings.weight" not in ranks.weights[0, 0][0]:
        raise UnknownFamily(
            f"{ranks.files[0, 0]}: is no decoder of a family that we know (no word embeddings or no dense MLP layers)"
        )
    last = ranks.weights[0, layout.pp - 1][-1]
    tied = "output_layer.weight" not in last or (
        layout.pp > 1 and not getattr(args, "untie_embeddings_and_output_weights", False)
    )
    return {
        "layers": sum(layout.stage_layers),
        "hidden": ranks.weights[0, 0][0]["embedding.word_embeddings.weight"].shape[-1],
        "ffn": layout.tp * layer["decoder.layers.0.mlp.linear_fc2.weight"].shape[-1],
        "vocab": _padded_rows(ranks),
        "tie_embeddings": tied,
        "qkv_bias": "decoder.layers.0.self_attention.linear_qkv.bias" in layer,
        "o_bias": "decoder.layers.0.self_attention.linear_proj.bias" in layer,
        "mlp_bias": "decoder.layers.0.mlp.linear_fc2.bias" in layer,
        "qk_norm": "decoder.layers.0.self_attention.q_layernorm.weight" in layer,
    }


def _padded_rows(ranks: _Ranks) -> int:
    return ranks.tp * int(ranks.weights[0, 0][0]["embedding.word_embeddings.weight"].shape[0])


def _vocab(options: LoadOptions, config: ModelConfig, args: Namespace, padded: int, tp: int) -> int:
    """The true vocabulary: as asked, as config.json or args say, or all rows."""
    told = options.true_vocab_size or (config.vocab if config.hf is not None else true_vocab(args, padded, tp))
    if told is None:
        _log.warning(
            "the true vocabulary size is unknown; all %d rows are kept, padding included (--true-vocab-size N cuts it)",
            padded,
        )
        return padded
    if not 0 < told <= padded:
        raise UsageError(f"a vocabulary of {told} is larger than the {padded} rows of the embedding")
    return told


def _training(listing: rank_files.RankFiles, state: Mapping[str, Any], args: Namespace) -> TrainingState:
    iteration = state.get("iteration", listing.iteration)
    return TrainingState(
        iteration if isinstance(iteration, int) else None,
        release=listing.iteration is None and listing.directory.name == rank_files.RELEASE,
        consumed_train_samples=getattr(args, "consumed_train_samples", None) or 0,
        consumed_valid_samples=getattr(args, "consumed_valid_samples", None) or 0,
    )


# Configuration to tensors.


def _place(ranks: _Ranks, layout: Layout, config: ModelConfig, padded: int) -> Iterator[Placed]:
    """Every tensor of every rank in its place. Raises TensorMismatch for missing and unknown ones."""
    naming, rows = _naming(ranks), family(config.family).rows
    for chunk in layout.chunks():
        for tp_rank in range(layout.tp):
            yield from _place_chunk(
                ranks, layout, chunk, tp_rank, [*native_tensors(rows, config, naming, layout, tp_rank, chunk, padded)]
            )


def _place_chunk(ranks: _Ranks, layout: Layout, chunk: Chunk, tp_rank: int, natives: list[Any]) -> Iterator[Placed]:
    chunks, file = ranks.weights[tp_rank, chunk.pp_rank], ranks.files[tp_rank, chunk.pp_rank]
    weights = chunks[chunk.vpp_rank] if chunk.vpp_rank < len(chunks) else {}
    natives = [native for native in natives if not native.tied_copy or native.name in weights]
    where = file if layout.vpp == 1 else f"{file} (model{chunk.vpp_rank})"
    same_names([native.name for native in natives], weights, where)
    for native in natives:
        yield Placed(native, weights[native.name], where)
