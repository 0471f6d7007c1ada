"""A run of this trainer that is only described, and the parameters of its pipeline stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megaconv.families import family
from megaconv.megatron.arguments.param_groups import is_expert
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import CORE
from megaconv.model.natives import NativeTensor, RankTensors
from megaconv.model.subjects import LayerKind
from megaconv.model.table import with_beside
from megaconv.planning.adapters import LayerAdapters
from megaconv.planning.run import Run
from megatron_lite.models.lora.parameters import row_parameters
from megatron_lite.models.lora.shares import Whole, modules_of
from megatron_lite.models.lora.whole import EMBEDDING, HEAD
from megatron_lite.models.mixers.table import stays_in_float32
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.parameters import (
    ParameterInfo,
    can_rest,
    is_head,
    is_partial,
    rows_info,
    tied_along,
    trained_tensors,
)
from megatron_lite.planning.adapters import PlannedAdapter, layer_adapters, planned_adapters
from megatron_lite.planning.encoders import Encoder
from megatron_lite.planning.work import Work
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from megatron_lite.settings.sizes import Sizes
from megatron_lite.settings.teacher import teacher_layout, teacher_options

PARTS = (
    "embedding", "layer_inputs", "encoder", "decoder", "mtp", "head_projection", "lm_head", "output_layer", "pooler", "binary_head",
)  # fmt: skip
"""The parts of a model in the order of its modules. Others follow."""
BEHIND = 1 << 30
"""The place after all layers, for sorting."""
UNTRAINED = ("router.expert_bias", ".layer_scalar", ".activation_func.beta", ".activation_func.eps")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Described:
    """A run as pretrain would set it up from the same flags and number of processes."""

    config: ModelConfig
    sizes: Sizes
    options: ModelOptions
    optimizer: OptimizerOptions
    work: Work = Work()  # noqa: RUF009  # frozen
    """The work of a step beside the passes of pretraining."""
    teacher: "Described | None" = None
    """The teacher of a distillation on the same ranks."""
    encoder: Encoder | None = None
    """The encoder that reads the images; None for a run on texts."""

    def taught_by(self, config: ModelConfig, encoder: Encoder | None = None) -> "Described":
        """Return the run with a teacher, which has the student's tokens and dtype. encoder: of the teacher's images."""
        described = changed(config, {"vocab": self.config.vocab, "dtype": self.options.dtype})
        sizes = replace(self.sizes, layout=teacher_layout(self.sizes.layout, described))
        options = teacher_options(self.options)
        teacher = Described(described, sizes, options, self.optimizer, encoder=encoder)
        return replace(self, teacher=teacher)

    @cached_property
    def run(self) -> Run:
        """The sizes from which megaconv's planner computes."""
        sizes, options = self.sizes, self.options
        return Run(
            config=self.config,
            layout=sizes.layout,
            dp=sizes.dp,
            cp=sizes.cp,
            seq=sizes.seq,
            decoder_seq=sizes.decoder_seq,
            micro_batch=sizes.micro_batch * self.work.rows,
            global_batch=sizes.batch.full * self.work.rows,
            dtype=options.dtype,
            sequence_parallel=options.sequence_parallel,
            recompute=options.recompute,
            offloaded=options.offloaded_layers,
            context=options.context,
            near=options.near,
            dispatcher=options.dispatcher,
            padded_to=options.balance.padded_to,
            balance=tuple(kind for kind, _ in options.balance.losses),
            moves_bias=options.balance.bias_rate != 0 and options.lora is None,
            sharding=self.optimizer.sharding,
            overlaps_reduce=self.optimizer.overlap_grad_reduce,
            overlaps_gather=self.optimizer.overlap_param_gather,
            vocab_divisor=options.vocab_divisor,
            trains=options.trains,
            frozen=options.lora is not None,
            trains_embedding=EMBEDDING in self._whole,
            trains_head=HEAD in self._whole,
            trains_rows=options.lora is not None and bool(options.lora.tokens_of(EMBEDDING)),
            adapters=self._adapters_by_kind,
            rests_mtp=self.work.rests_mtp,
            rests_head=self.work.rests_head,
            head_again=self.work.head_again,
            losses=self.work.losses,
        )

    @cached_property
    def _tensors(self) -> RankTensors:
        rows = with_beside(family(self.config.family).rows, self.config)
        vocab_rows = padded_vocab(
            self.config.vocab, self.options.vocab_divisor, self.sizes.layout.tp
        )
        return RankTensors(rows, self.config, CORE, self.sizes.layout, vocab_rows)

    def parameters(self, index: int, chunk: Chunk) -> Sequence[ParameterInfo]:
        """Return the parameters of a chunk on the first tensor and expert ranks, in the order of a forward pass, unit by unit.

        Other ranks hold the same number of parameters. The list is made once: experts have many tensors.
        """
        key = index, chunk
        if key not in self._listed:
            self._listed[key] = self._list(index, chunk)
        return self._listed[key]

    @cached_property
    def _listed(self) -> dict[tuple[int, Chunk], Sequence[ParameterInfo]]:
        """The parameters of the chunks that were listed before."""
        return {}

    def _list(self, index: int, chunk: Chunk) -> Sequence[ParameterInfo]:
        natives = (native for native, *_ in trained_tensors(self._tensors.of(0, chunk)).values())
        return [
            self._info(index, native)
            for native in sorted(natives, key=lambda native: _place(native.name))
        ]

    def adapters(self, index: int, chunk: Chunk) -> list[PlannedAdapter]:
        """Return the adapters of a chunk, on the same ranks and in the same order."""
        lora = self.options.lora
        if lora is None:
            return []
        infos = self.parameters(index, chunk)
        tp = self.sizes.layout.tp
        modules = self._modules
        return list(planned_adapters(infos, modules, lora, tp, sequence=self._sequence))

    @cached_property
    def _modules(self) -> Mapping[str, Whole]:
        return modules_of(self.config)

    def trained(self, index: int, chunk: Chunk) -> list[ParameterInfo]:
        """Return the parameters of a chunk that have gradients, in the order of the trainer's buckets."""
        own = (info for info in self.parameters(index, chunk) if info.trained)
        return [*self.beside(index, chunk), *own]

    def in_order(self, index: int, chunk: Chunk) -> list[ParameterInfo]:
        """Return all parameters of a chunk, those of adapters included, unit by unit."""
        found = [*self.parameters(index, chunk), *self.beside(index, chunk)]
        return sorted(found, key=lambda info: _place(info.name))

    def beside(self, index: int, chunk: Chunk) -> list[ParameterInfo]:
        """Return the parameters of adapters, and trained rows of single tokens."""
        lora = self.options.lora
        if lora is None:
            return []
        found = [info for adapter in self.adapters(index, chunk) for info in adapter.infos]
        named = {info.name: info for info in self.parameters(index, chunk)}
        natives = [info.native for info in named.values()]
        for each in row_parameters(natives, lora):
            matrix = named[each.matrix.name]
            found.append(
                rows_info(matrix, each.rows, self.sizes.layout.tp, sequence=self._sequence)
            )
        return found

    @cached_property
    def _adapters_by_kind(self) -> tuple[tuple[LayerKind, LayerAdapters], ...]:
        """The adapters of a layer of each kind. Targets may name single layers: the layer with most of them counts."""
        lora = self.options.lora
        if lora is None:
            return ()
        whole = Chunk(0, 0, 0, self.config.layer_count, is_first=True, is_last=True)
        by_layer: dict[int, list[PlannedAdapter]] = {}
        for adapter in self.adapters(0, whole):
            by_layer.setdefault(adapter.layer, []).append(adapter)
        found: dict[LayerKind, LayerAdapters] = {}
        for layer, adapters in by_layer.items():
            kind, sizes = self.config.layers[layer], layer_adapters(adapters, lora)
            found[kind] = max(sizes, found.get(kind, sizes), key=lambda each: each.parameters)
        return tuple(found.items())

    @property
    def _sequence(self) -> bool:
        return self.options.sequence_parallel and self.sizes.layout.tp > 1

    def _info(self, index: int, native: NativeTensor) -> ParameterInfo:
        """Return the facts that modules declare, but from the family's table. The table also covers models without modules."""
        kind, layout = kind_of(native, self.config), self.sizes.layout
        rests = self.work.rests_mtp and can_rest(native.name, kind)
        own_head = self.work.rests_head and not self.config.tie_embeddings
        rests = rests or (own_head and is_head(native.name))
        return ParameterInfo(
            index,
            native,
            kind,
            partial=is_partial(kind, layout.tp, sequence=self._sequence),
            tied=tied_along(native, kind, self.config, layout),
            is_copy=native.copy is not None,
            frozen=self._is_frozen(native.name) or rests,
            in_float32=stays_in_float32(native.name),
            rests=rests,
        )

    def _is_frozen(self, name: str) -> bool:
        """Return whether a parameter keeps its value. Some modules are trained whole beside adapters."""
        of_scores = name == "output_layer.weight" and self.config.has("scores")
        lora = self.options.lora
        return lora is not None and lora.freezes(name) and not of_scores

    @property
    def _whole(self) -> tuple[str, ...]:
        """The modules that are trained whole beside adapters."""
        lora = self.options.lora
        return () if lora is None else lora.whole


def kind_of(native: NativeTensor, config: ModelConfig) -> Kind:
    """Return the kind of a parameter, from its name and sharding."""
    if is_expert(native.name):
        return Kind.EXPERT
    if native.name.endswith(UNTRAINED):
        return Kind.UNTRAINED
    if ".core_attention.indexer." in native.name:
        return Kind.CONSTANT
    if native.replicated:
        of_heads = config.attention.qk_norm and native.name.endswith(
            ("q_layernorm.weight", "k_layernorm.weight")
        )
        of_columns = ".activation_func." in native.name
        return Kind.OF_HEADS if of_heads or of_columns else Kind.OF_TOKENS
    return Kind.VOCABULARY if native.name in VOCABULARY else Kind.SHARDED


def _place(name: str) -> tuple[int, int]:
    """Return the sort key of a parameter in the order of modules: its part of the model, and the number of its layer."""
    parts = name.split(".")
    part = PARTS.index(parts[0]) if parts[0] in PARTS else len(PARTS)
    return part, int(parts[2]) if parts[1:2] == ["layers"] else BEHIND
