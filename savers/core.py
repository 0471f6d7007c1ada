"""Megatron core in `torch` format: a rank directory for every tensor and pipeline rank, the tracker, and `hf/` for the rest."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from formats import rank_files, torch_zip
from formats.output import FileLayout, PlainFile
from formats.pickle_records import TorchDtype
from formats.pickle_writer import Placeholder
from formats.tensor import ITEMSIZE, Box, matrix_shape
from megaconv.config import ModelConfig
from megaconv.errors import LayoutError, NotExpressible, UsageError
from megaconv.families import family
from megaconv.hf_config import CONFIG_NAME, config_json
from megaconv.ir import Header, Key
from megaconv.layout import Chunk, LayerSplit, Layout, padded_vocab, split_layers
from megaconv.megatron_args import to_arguments
from megaconv.megatron_names import extra_states, module_order
from megaconv.options import SaveOptions
from megaconv.plan import OutputPlan, Placement
from megaconv.sidecars import SIDECAR_DIRECTORY
from megaconv.table import NativeTensor, Region, native_tensors

DESCRIPTION = "Megatron core, torch format, at any tensor / pipeline / virtual-pipeline parallel layout"

DEFAULT_DIVISOR = 128
NAMINGS = {"transformer_engine": "core", "local": "core_local"}


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """Raises LayoutError for a model that can't be cut this way, NotExpressible for what Megatron has no words for."""
    _check(options)
    return _Planner.of(header, options).plan()


def _check(options: SaveOptions) -> None:
    if options.transformer_impl not in NAMINGS:
        raise UsageError(
            f"transformer_impl {options.transformer_impl!r} is not known; choose one of {', '.join(NAMINGS)}"
        )
    if options.ckpt_format != "torch":
        raise UsageError(f"checkpoint format {options.ckpt_format!r} can't be written; choose torch")
    if options.vocab_padding not in ("repeat", "zero"):
        raise UsageError(f"vocabulary padding {options.vocab_padding!r} is not known; choose repeat or zero")


def choose_layout(config: ModelConfig, source: Layout | None, options: SaveOptions) -> Layout:
    """Sizes as asked, else the source's, else 1; the source's layer split is kept while it fits."""
    source = source or Layout(stage_layers=(config.layers,))
    tp, pp, vpp = (
        options.tp or source.tp,
        options.pp or source.pp,
        options.vpp or (source.vpp if options.pp in (None, source.pp) else 1),
    )
    for name, size in (("expert", options.ep), ("expert tensor", options.etp)):
        if size not in (None, 1) and not (name == "expert tensor" and size == tp):
            raise LayoutError(f"{name} parallel size {size}: this model has no experts; leave it at 1")
    keep = (pp, vpp) == (source.pp, source.vpp) and options.split == LayerSplit()
    stages = source.stage_layers if keep else split_layers(config.layers, pp, vpp, options.split)
    return Layout(tp, pp, vpp, stage_layers=stages)


@dataclass(frozen=True)
class _Planner:
    header: Header
    options: SaveOptions
    layout: Layout
    divisor: int
    padded: int
    arguments: Namespace

    @classmethod
    def of(cls, header: Header, options: SaveOptions) -> "_Planner":
        layout = choose_layout(header.config, header.layout, options)
        divisor = options.vocab_divisor or header.vocab_divisor or DEFAULT_DIVISOR
        padded = padded_vocab(header.config.vocab, divisor, layout.tp)
        arguments = to_arguments(
            header.config,
            layout,
            header.training,
            transformer_impl=options.transformer_impl,
            vocab_divisor=divisor,
            padded_vocab=padded,
            allow_lossy="rope_scaling" in options.allow_lossy,
        )
        arguments["params_dtype"] = TorchDtype(arguments["params_dtype"])
        return cls(header, options, layout, divisor, padded, Namespace(**arguments))

    def plan(self) -> OutputPlan:
        version = rank_files.iteration_directory(None if self._release else self._iteration)
        files: dict[str, FileLayout] = {}
        placements: dict[Key, list[Placement]] = {}
        zeros: list[tuple[str, str, int, int]] = []
        for pp_rank in range(self.layout.pp):
            chunks = [chunk for chunk in self.layout.chunks() if chunk.pp_rank == pp_rank]
            for tp_rank in range(self.layout.tp):
                name = (
                    f"{version}/{rank_files.rank_directory(tp_rank, pp_rank, self.layout.pp)}/{rank_files.MODEL_FILE}"
                )
                models = {self._model_key(chunk): self._natives(tp_rank, chunk) for chunk in chunks}
                files[name] = torch_zip.plan(self._state(models), "model_optim_rng")
                for model, natives in models.items():
                    for native in natives:
                        self._place(name, f"{model}/{native.name}", native, placements, zeros)
        files |= self._sidecars()
        files[rank_files.TRACKER] = PlainFile((rank_files.RELEASE if self._release else str(self._iteration)).encode())
        return OutputPlan(files, placements, zeros)

    @property
    def _release(self) -> bool:
        return self.options.release or self.header.training.release

    @property
    def _iteration(self) -> int:
        return self.header.training.iteration or 1

    def _model_key(self, chunk: Chunk) -> str:
        return "model" if self.layout.vpp == 1 else f"model{chunk.vpp_rank}"

    def _natives(self, tp_rank: int, chunk: Chunk) -> list[NativeTensor]:
        config = self.header.config
        naming = NAMINGS[self.options.transformer_impl]
        natives = native_tensors(family(config.family).rows, config, naming, self.layout, tp_rank, chunk, self.padded)
        # A tied head is stored a second time only where the embedding is on another stage.
        kept = [native for native in natives if not (native.tied_copy and chunk.is_first)]
        return sorted(kept, key=lambda native: module_order(native.name))

    def _state(self, models: dict[str, list[NativeTensor]]) -> dict[str, Any]:
        state: dict[str, Any] = {
            "args": self.arguments,
            "checkpoint_version": 3.0,
            "iteration": 0 if self._release else self._iteration,
        }
        state |= {model: dict(self._entries(model, natives)) for model, natives in models.items()}
        return state | {"num_floating_point_operations_so_far": 0}

    def _entries(self, model: str, natives: list[NativeTensor]) -> Iterator[tuple[str, Placeholder | None]]:
        entries: dict[str, Placeholder | None] = {
            native.name: Placeholder(f"{model}/{native.name}", native.shape, self._dtype(native)) for native in natives
        }
        has_head = any(native.name == "decoder.final_layernorm.weight" for native in natives)
        for name, is_tensor in extra_states(list(entries), has_head=has_head).items():
            entries[name] = Placeholder(f"{model}/{name}", (0,), "uint8") if is_tensor else None
        yield from sorted(entries.items(), key=lambda entry: module_order(entry[0]))

    def _dtype(self, native: NativeTensor) -> str:
        dtypes = {self.header.manifest[Key(name)].dtype for name in native.parts}
        if len(dtypes) > 1:
            raise NotExpressible(
                f"{native.name}: would join tensors of {' and '.join(sorted(dtypes))}; give --dtype to have them all the same"
            )
        return dtypes.pop()

    def _place(
        self,
        file: str,
        record: str,
        native: NativeTensor,
        placements: dict[Key, list[Placement]],
        zeros: list[tuple[str, str, int, int]],
    ) -> None:
        rows, cols = matrix_shape(native.shape)
        row_bytes = cols * ITEMSIZE[self._dtype(native)]
        filled = rows - native.padding_rows
        for name, regions in native.parts.items():
            if native.padding_rows and self.options.vocab_padding == "repeat":
                last = self.header.config.vocab - 1
                regions = (*regions, Region(Box(last, last + 1, 0, cols), filled, native.padding_rows))
            placements.setdefault(Key(name), []).append(Placement(file, record, row_bytes, regions))
        if native.padding_rows and self.options.vocab_padding == "zero":
            zeros.append((file, record, filled * row_bytes, native.padding_rows * row_bytes))

    def _sidecars(self) -> dict[str, FileLayout]:
        """config.json and tokenizer files: what Megatron's own args would lose on the way back."""
        config = self.header.config
        files: dict[str, FileLayout] = {
            f"{SIDECAR_DIRECTORY}/{name}": PlainFile(path.read_bytes()) for name, path in self.header.files.items()
        }
        try:
            written = family(config.family).write_hf(config)
        except NotExpressible:
            return files  # a mixture that only Megatron knows: its args say all there is to say
        return files | {f"{SIDECAR_DIRECTORY}/{CONFIG_NAME}": PlainFile(config_json(config, written))}
