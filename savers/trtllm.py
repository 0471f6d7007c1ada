"""TensorRT-LLM's own checkpoints, from which trtllm-build makes engines: config.json and a file for each rank.

    config.json, rank0.safetensors, rank1.safetensors ...     rank = pipeline rank * tp + tensor-parallel rank

The vocabulary is padded with zeros to a multiple of tp. Source: what nvidia-modelopt 0.47 writes.
"""

from collections.abc import Iterator

from formats.output import FileLayout, PlainFile
from formats.safetensors import SafetensorsLayout
from megaconv.engine.plan import (
    OutputPlan,
    Placement,
    Zeros,
    add_placements,
    native_dtype,
    padding_of,
)
from megaconv.engine.sidecars import small_files
from megaconv.errors import UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key
from megaconv.model.layout import LayerSplit, Layout, padded_vocab, split_layers
from megaconv.model.naming import TRTLLM
from megaconv.model.natives import NativeTensor, RankTensors, unsharded_tensors
from megaconv.options import FP8, SaveOptions
from megaconv.saver import Saver
from megaconv.trtllm.config import config_json
from megaconv.trtllm.names import supported_family, trtllm_rows
from megaconv.trtllm.rank_files import rank_file, rank_metadata
from megaconv.trtllm.scales import Fp8Forms, with_scales
from megaconv.values.calibration import read_calibration
from megaconv.values.forms import Form


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ("tp", "pp", "quantize", "calibration")


def forms(header: Header, options: SaveOptions) -> dict[Key, Form]:
    """The storage forms of the matrices in FP8. Raises UsageError for another quantization."""
    rows = trtllm_rows(supported_family(header.config))
    if options.quantize is None:
        if options.calibration is not None:
            raise UsageError("--calibration: is for a quantized output; pass --quantize fp8 too")
        return {}
    if options.quantize != FP8:
        raise UsageError(
            f"--quantize {options.quantize}: --saver trtllm writes plain weights and fp8; "
            "TensorRT-LLM loads the others from --saver hf"
        )
    if options.calibration is None:
        raise UsageError(
            "--quantize fp8: needs statistics of activations; run `megatron-lite calibrate` and pass its file as --calibration",
            code="option-needed",
        )
    statistics = read_calibration(options.calibration)
    natives = [
        native for native in unsharded_tensors(rows, header.config, TRTLLM) if native.copy is None
    ]
    return Fp8Forms(header, statistics).of(natives)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output.

    Raises LayoutError for a model that can't be sharded this way, and NotExpressible for one that the files can't hold.
    """
    config = header.config
    layout = _layout(config, options)
    files: dict[str, FileLayout] = {**small_files(header)}
    files[CONFIG_NAME] = PlainFile(config_json(config, layout, _quantization(options)))
    placements: dict[Key, list[Placement]] = {}
    zeros: list[Zeros] = []
    for rank, natives in enumerate(_ranks(header, layout)):
        file = rank_file(rank)
        tensors = {native.name: (native.shape, native_dtype(header, native)) for native in natives}
        files[file] = SafetensorsLayout(tensors, rank_metadata(rank, layout.tp * layout.pp))
        for native in natives:
            add_placements(placements, header, native, file, native.name)
            zeros += padding_of(header, native, file, native.name)
    return OutputPlan(files, placements, zeros, notices=_notices(options))


def _layout(config: ModelConfig, options: SaveOptions) -> Layout:
    """The requested sizes. Every pipeline stage has as many layers."""
    tp, pp = options.tp or 1, options.pp or 1
    stages = split_layers(config.layer_count, pp, 1, LayerSplit())
    return Layout(tp=tp, pp=pp, stage_layers=stages)


def _ranks(header: Header, layout: Layout) -> Iterator[list[NativeTensor]]:
    """Yield the tensors of each rank, stage by stage."""
    config = header.config
    rows = trtllm_rows(supported_family(config))
    vocab = padded_vocab(config.vocab, 1, layout.tp)
    tensors = RankTensors(rows, config, TRTLLM, layout, vocab)
    for chunk in layout.chunks():
        for tp_rank in range(layout.tp):
            found: list[NativeTensor] = []
            for native in tensors.of(tp_rank, chunk):
                if native.copy is None or native.copy.written:
                    found += with_scales(native, header)
            yield found


def _quantization(options: SaveOptions) -> dict[str, object]:
    if options.quantize is None:
        return {"quant_algo": None, "kv_cache_quant_algo": None}
    return {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}


def _notices(options: SaveOptions) -> tuple[str, ...]:
    if options.quantize is None:
        return ()
    return (
        "matrices of attention and MLP are rounded to float8_e4m3fn with one scale; q, k and v share one, and gate and up do",
    )


SAVER = Saver(
    name="trtllm",
    description="TensorRT-LLM's own checkpoint of a Llama or GPT-2: config.json with rank*.safetensors, for trtllm-build",
    plan=plan,
    uses=uses,
    forms=forms,
    reads_back=True,
)
