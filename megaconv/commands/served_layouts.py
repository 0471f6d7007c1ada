"""`megaconv plan --for infer`: the layouts of an inference server, those with the most tokens per second first."""

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import join
from typing import Any

from megaconv.commands.only_in_files import only_in_files
from megaconv.commands.text_table import Column, heading_line, table_line
from megaconv.commands.units import readable, readable_time
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header
from megaconv.planning.gpus import Gpu
from megaconv.planning.layer_costs import Machine
from megaconv.planning.model_size import parameter_count
from megaconv.planning.served import Served
from megaconv.planning.serving_flags import megatron_lite_flags, megatron_lm_flags, vllm_flags
from megaconv.planning.serving_search import WantedServer, search_servers

TOO_SMALL = "memory too small"


@dataclass(frozen=True)
class PlacedServer:
    """One layout of the list."""

    rank: int
    """Its place, from 1."""
    served: Served
    limit: str
    """The largest term of a token's time. `memory too small` if the layout doesn't fit."""

    def to_json(self) -> dict[str, Any]:
        served, serving = self.served, self.served.serving
        return {
            "rank": self.rank, **serving.layout.sizes(), "vpp": 1, "cp": 1, "dp": serving.dp, "gpus": serving.world,
            "stage_layers": list(serving.layout.stage_layers), "sequences": serving.batch * serving.dp,
            "first_token_seconds": served.first_token, "token_seconds": served.time.total, "terms": served.time.terms(),
            "tokens_per_second": served.tokens_per_second, "limit": self.limit, "parameters": served.parameters,
            "memory": {**served.memory.parts(), "total": served.memory.total}, "fits": self.limit != TOO_SMALL,
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class ServedLayouts:
    """The layouts of a server, the most tokens per second first."""

    config: ModelConfig
    gpu: Gpu
    wanted: WantedServer
    gpus: int
    placed: tuple[PlacedServer, ...]
    fitting: int
    """Number of layouts that fit the memory."""

    def __repr__(self) -> str:
        return f"<ServedLayouts: {self.fitting} layouts fit>"

    @property
    def parameters(self) -> int:
        """Parameters of the model, without layers that predict further tokens."""
        return parameter_count(self.config)

    def to_json(self) -> dict[str, Any]:
        return {
            "layouts": [one.to_json() for one in self.placed], "fitting": self.fitting, "gpus": self.gpus,
            "gpu": self.gpu.name, "gpu_memory": self.wanted.memory, "parameters": self.parameters,
            "flags": self.flags(), "notices": list(only_in_files(self.config)),
        }  # fmt: skip

    def flags(self) -> dict[str, list[str]]:
        """Return the flags of the first layout by program; none for a program that can't serve it."""
        first = self.placed[0].served.serving
        return {
            "megatron_lm": megatron_lm_flags(first),
            "megatron_lite": megatron_lite_flags(first),
            "vllm": vllm_flags(first),
        }

    def description(self) -> Iterator[str]:
        """Yield what is searched, and how many layouts fit."""
        wanted = self.wanted
        yield f"{self.config.family}, {self.parameters:,} parameters"
        number = "as many sequences as fit"
        if wanted.sequences is not None:
            number = f"{wanted.sequences:,} sequences"
        yield (
            f"{self.gpus:,} {self.gpu.name} of {readable(wanted.memory)}; {number} at a time, of {wanted.seq:,} tokens with "
            "their prompts"
        )
        fitting = "1 layout fits" if self.fitting == 1 else f"{self.fitting:,} layouts fit"
        yield f"{fitting} the memory; an estimate, not a measurement"
        yield from only_in_files(self.config)

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        yield from self.description()
        yield heading_line(COLUMNS)
        for one in self.placed:
            yield _row(one)
        yield ""
        yield from self._first()

    def _first(self) -> Iterator[str]:
        served = self.placed[0].served
        time, parts = served.time, served.memory.parts()
        terms = ", ".join(
            f"{name} {value / time.total:.0%}" for name, value in time.terms().items()
        )
        sizes = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
        yield f"a token's time in the first one: {terms}"
        yield f"memory of its fullest rank: {sizes}"
        replicas = served.serving.dp
        if replicas > 1:
            yield f"flags of one of the {replicas:,} replicas; vLLM starts all of them if --data-parallel-size is given:"
        flags = self.flags()
        own = flags["megatron_lite"]
        yield f"Megatron-LM:   {join(flags['megatron_lm'])}"
        yield f"megatron-lite: {join(own) if own else CANNOT_SERVE}"
        yield f"vLLM:          {join(flags['vllm'])}"


CANNOT_SERVE = (
    "can't serve this layout: it has no FP8 weights or caches; replicas don't share experts, and tensor ranks don't share "
    "key/value heads"
)
COLUMNS = (
    Column("#", 4),
    Column("TP", 3),
    Column("PP", 3),
    Column("EP", 4),
    Column("ETP", 3),
    Column("DP", 4),
    Column("sequences", 9),
    Column("first token", 11),
    Column("each token", 10),
    Column("tokens/s", 9),
    Column("a GPU", 7),
    Column("memory", 10, gap=2),
    Column("dominated by", 0, is_left=True, gap=2),
)


def _row(one: PlacedServer) -> str:
    served, serving = one.served, one.served.serving
    layout, rate = serving.layout, served.tokens_per_second
    sizes = (one.rank, layout.tp, layout.pp, layout.ep, layout.etp, serving.dp)
    texts = [
        *map(str, sizes),
        f"{serving.batch * serving.dp:,}",
        readable_time(served.first_token),
        readable_time(served.time.total),
        f"{rate:,.0f}",
        f"{rate / serving.world:,.0f}",
        readable(served.memory.total),
        one.limit,
    ]
    return table_line(COLUMNS, texts)


def served_layouts(
    header: Header, wanted: WantedServer, machine: Machine, top: int
) -> ServedLayouts:
    """Search the layouts of a server. Raises UsageError if no layout has these sizes."""
    config = header.config
    if config.encoder.layers:
        raise UsageError(
            f"{config.family}: --for infer is for models with a decoder alone; leave it out"
        )
    if config.has("both_ways"):
        raise UsageError(f"{config.family} generates no text; leave --for infer out")
    if config.has("scores"):
        raise UsageError(
            f"the head of this {config.family} gives scores, so it generates no text; leave --for infer out"
        )
    # Servers ignore the layers that predict further tokens, and compute in bf16 what is quantized.
    dtype = config.dtype if config.dtype in ("bfloat16", "float16", "float32") else "bfloat16"
    config = changed(config, {"dtype": dtype, "mtp_layers": 0})
    found = search_servers(config, wanted, machine)
    listed = found.fitting or found.others[:1]
    if not listed:
        raise UsageError(_reason(config, wanted))
    placed = [
        PlacedServer(rank, one, _limit(one, fits=bool(found.fitting)))
        for rank, one in enumerate(listed[:top], 1)
    ]
    return ServedLayouts(config, machine.gpu, wanted, found.gpus, tuple(placed), len(found.fitting))


def _limit(served: Served, *, fits: bool) -> str:
    terms = served.time.terms()
    return max(terms, key=lambda term: terms[term]) if fits else TOO_SMALL


def _reason(config: ModelConfig, wanted: WantedServer) -> str:
    """Return why no layout has these sizes, with the flags of plan."""
    sizes = {"gpus": wanted.gpus, "global-batch-size": wanted.sequences, **wanted.fixed}
    given = " ".join(f"--{name} {size}" for name, size in sizes.items() if size is not None)
    return (
        f"no layout of {config.family} for inference has these sizes: {given}; --tp x --pp has to divide --gpus, --tp the heads, "
        "and --ep has to be 1, TP or TP x replicas"
    )
