"""Megatron core itself, run on the CPU: four gloo processes that load a checkpoint and answer with its logits.

    with Megatron(directory) as megatron:
        logits = megatron.logits(checkpoint, tokens)

The parent imports neither Megatron nor its patches: `python -m tests.megatron_oracle` does so once, and forks the ranks. A rank
reads one JSON job a line (checkpoint, file of tokens, file for logits) and answers each with one line.

A model is built from nothing but the `args` of the checkpoint, in the way that Megatron-LM's own training scripts do it:
core_transformer_config_from_args (megatron/training/arguments.py) and the GPT builder (gpt_builders.py), core 0.16.1.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from tests import (
    custom_layers,
    delta_net_oracle,
    encoder_oracle,
    mamba_oracle,
    score_oracle,
    sparse_oracle,
)
from tests.custom_layers import CORES_OWN, Needs

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

WORLD = 4
"""Processes. A layout of fewer ranks is run by the first of them."""
REPOSITORY = Path(__file__).parents[1]
REPLY = "megatron-oracle "
TIMEOUT = timedelta(seconds=60)
DEPRECATED = ("moe_deepep_num_sms", "moe_hybridep_num_sms")
"""Fields of GPU kernels that compute nothing. Core 0.19 refuses the defaults that older releases saved: they differ."""


def installed_minor() -> int:
    """The minor number of the installed release of Megatron core."""
    return int(metadata.version("megatron-core").split(".")[1])


def for_this_release(ckpt_format: str = "torch") -> dict[str, str]:
    """The saver's option for rank files that the installed release of Megatron core loads."""
    minor = installed_minor()
    release = "0.19" if minor >= 19 else "0.17" if minor >= 17 else "0.16"
    return {"release": release} if ckpt_format == "torch" else {}


class OracleFailed(Exception):
    """Megatron would not load or run a checkpoint; says what every rank said."""


class Rank(NamedTuple):
    """The parent's ends of two pipes."""

    jobs: IO[str]
    replies: IO[str]


class Megatron:
    """The parent's side. Ranks start with the first question, and again after a failed one."""

    def __init__(self, directory: Path) -> None:
        """directory: an existing one of our own, for what passes between the processes."""
        self._directory, self._ranks, self._count = directory, list[Rank](), 0
        self._forks: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Megatron":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def logits(
        self, checkpoint: Path, tokens: "torch.Tensor", *, further: bool = False
    ) -> "torch.Tensor":
        """float32 [batch, sequence, padded vocabulary]. Raises OracleFailed unless every name of every rank file fits.

        further: True for the logits of MTP layers too, which follow the others as if they were more of the sequence.
        """
        return cast("torch.Tensor", self.answer(checkpoint, tokens, further=further).float())

    def save(self, checkpoint: Path, tokens: "torch.Tensor", target: Path) -> "torch.Tensor":
        """The logits, after Megatron saved the model as torch_dist: weights alone, without args, as verl does."""
        target.mkdir()
        return cast("torch.Tensor", self.answer(checkpoint, tokens, saved=target).float())

    def answer(
        self,
        checkpoint: Path,
        tokens: Any,
        *,
        further: bool = False,
        saved: Path | None = None,
    ) -> Any:
        """The answers of a model. For models with an encoder, see tests/encoder_oracle.py. further: see logits. saved: see
        save."""
        import torch

        if not self._ranks:
            self._start()
        self._count += 1
        asked, answer = (
            self._directory / f"tokens-{self._count}.pt",
            self._directory / f"logits-{self._count}.pt",
        )
        torch.save(tokens, asked)
        for rank in self._ranks:
            paths = [str(checkpoint), str(asked), str(answer)]
            _write_line(rank.jobs, json.dumps([*paths, further, saved and str(saved)]))
        replies = [_read_reply(rank.replies) for rank in self._ranks]
        if any(reply != "done" for reply in replies):
            self._stop()
            raise OracleFailed(
                "\n".join(f"rank {rank}: {reply}" for rank, reply in enumerate(replies))
                + self._errors()
            )
        return torch.load(answer)

    def _start(self) -> None:
        environment = (
            os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "ignore",
                "TORCHDYNAMO_DISABLE": "1",  # compiling Megatron's activations takes seconds in each rank
            }
        )
        jobs, replies = ([os.pipe() for _ in range(WORLD)] for _ in range(2))
        theirs = [(job[0], reply[1]) for job, reply in zip(jobs, replies, strict=True)]
        command = [sys.executable, "-m", "tests.megatron_oracle"]
        with (self._directory / "rank-forks.log").open("w") as log:
            self._forks = subprocess.Popen(
                [*command, json.dumps(theirs), str(self._directory)],
                cwd=REPOSITORY,
                env=environment,
                stderr=log,
                pass_fds=[end for ends in theirs for end in ends],
                start_new_session=True,  # ranks that wait for each other end with the group
            )
        for end in (end for ends in theirs for end in ends):
            os.close(end)
        self._ranks = [
            Rank(os.fdopen(job[1], "w"), os.fdopen(reply[0]))
            for job, reply in zip(jobs, replies, strict=True)
        ]

    def _stop(self) -> None:
        if self._forks is None:
            return
        os.killpg(self._forks.pid, signal.SIGKILL)
        self._forks.wait()
        for rank in self._ranks:
            rank.replies.close()
            with contextlib.suppress(OSError):
                rank.jobs.close()
        self._ranks, self._forks = [], None

    def _errors(self) -> str:
        """The end of what each rank wrote to its standard error."""
        return "".join(
            f"\n{log.name}:\n{log.read_text()[-2000:]}"
            for log in sorted(self._directory.glob("rank-*.log"))
        )


def _write_line(stream: IO[str], line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a rank that died is noticed by its missing reply
        print(line, file=stream, flush=True)


def _read_reply(stream: IO[str]) -> str:
    for line in stream:
        if line.startswith(REPLY):
            return str(json.loads(line.removeprefix(REPLY)))
    return "ended without a reply"


# A rank's side.


def run_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Let Megatron core 0.16 run without CUDA, Apex and Transformer Engine; call before a model is built. Affects all of torch.

    - torch.cuda.current_device() is the device on which layers, collectives and rotary frequencies are allocated.
    - The router asks whether Transformer Engine's matrix product is None, a name that is missing without it.
    - Latent attention tells its core the widths of keys and values, which Transformer Engine's takes and the local one,
      whose arithmetic works for any, does not; and it asks whether layers are Transformer Engine's.
    - CudaRNGStatesTracker.fork() keeps dropout's random states, which live on the GPU; dropout is 0 here.
    - Causal and sliding-window masks are made with device="cuda", and tied embeddings are moved there by Tensor.cuda() when
      pipeline ranks agree on them: inside the context returned, torch is asked for the CPU instead, so that all arithmetic
      stays Megatron's own.
    """
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                return args[0]
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    made = DotProductAttention.__init__

    def without_widths(
        self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        made(self, *args, **kwargs)

    DotProductAttention.__init__ = without_widths
    multi_latent_attention.HAVE_TE = False
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    moe_utils.te_general_gemm = None
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    _forget_strides()
    return OnCpu()


def _forget_strides() -> None:
    """Core up to 0.19 passes every property of a distributed tensor to torch.empty. From torch 2.15 on, strides are one."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    set_all: Any = TensorProperties.__setstate__

    def set_others(self: Any, state: Any) -> None:
        set_all(self, state)
        vars(self).pop("strides", None)

    TensorProperties.__setstate__ = set_others  # type: ignore[method-assign]


def read_rank_file(path: Path) -> dict[str, Any]:
    """The file as Megatron 0.14 and newer read it: tensors, plain values, the Namespace and numpy's generators get through."""
    import numpy as np
    import torch

    numpy = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]
    with torch.serialization.safe_globals([argparse.Namespace, *numpy]):
        return cast(dict[str, Any], torch.load(path, weights_only=True))


def version_directory(checkpoint: Path) -> Path:
    """The directory of the iteration that the tracker names."""
    tracker = (checkpoint / "latest_checkpointed_iteration.txt").read_text().strip()
    return checkpoint / ("release" if tracker == "release" else f"iter_{int(tracker):07d}")


def virtual_stages(args: Namespace) -> int | None:
    """The number of virtual stages, derived from a checkpoint's args as validate_args does; None without
    interleaving."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    found: int | None
    if args.pipeline_model_parallel_layout is not None:
        stages = PipelineParallelLayerLayout.get_num_stages_from_str(
            args.pipeline_model_parallel_layout
        )
        found = stages // args.pipeline_model_parallel_size
    elif mamba_oracle.virtual_stages(args) > 1:
        found = mamba_oracle.virtual_stages(args)
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        found = (
            args.num_layers
            // args.pipeline_model_parallel_size
            // args.num_layers_per_virtual_pipeline_stage
        )
    else:
        found = None
    found = None if found == 1 else found
    assert found == args.virtual_pipeline_model_parallel_size, (
        "the args contradict each other about virtual stages"
    )
    return found


def transformer_config(args: Namespace) -> "TransformerConfig":
    """core_transformer_config_from_args: every argument that is a field, and those with other names.

    What follows are the command-line flags that a machine without CUDA needs.
    """
    import torch
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    known: dict[str, Any] = {
        item.name: getattr(args, item.name)
        for item in fields(kind)
        if hasattr(args, item.name) and item.name not in DEPRECATED
    }
    known |= {
        "layernorm_zero_centered_gamma": False,  # see as_others_do
        **delta_net_oracle.settings(args),
        "pipeline_dtype": args.params_dtype,
        "num_moe_experts": args.num_experts,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "activation_func": torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        **({"activation_func": quick_gelu, "gated_linear_unit": True} if args.quick_geglu else {}),
        **({"activation_func": squared_relu} if args.squared_relu else {}),
        # The fused kernel computes another gelu, so that it is part of the model; for silu it changes nothing.
        "bias_activation_fusion": args.bias_gelu_fusion,
    }
    without_cuda = (
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
    )
    others = {
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "moe_token_dispatcher_type": "allgather",
    }
    if args.normalization == "LayerNorm":
        # On a CPU torch's LayerNorm replaces Apex's. It has no sequence parallelism.
        others["sequence_parallel"] = False
    config = kind(**known | others | dict.fromkeys(without_cuda, False))
    # No fields of this release: whoever builds a model with yarn sets them, and GPTModel asks for them.
    for name in (
        name for name in vars(args) if name.startswith("yarn_") or name == "attn_logit_softcapping"
    ):
        setattr(config, name, getattr(args, name))
    return config


def build(args: Namespace, virtual_stage: int | None, needs: Needs = CORES_OWN) -> Any:
    """One model chunk."""
    if encoder_oracle.is_t5(args):
        return encoder_oracle.build_t5(args, transformer_config(args))
    if encoder_oracle.is_bert(args):
        return encoder_oracle.build_bert(args, transformer_config(args), virtual_stage)
    if mamba_oracle.is_hybrid(args):
        return mamba_oracle.build(args, transformer_config(args), virtual_stage)
    return build_gpt(args, virtual_stage, needs)


def build_gpt(args: Namespace, virtual_stage: int | None, needs: Needs) -> "GPTModel":
    """One model chunk, as the GPT builder makes it.

    The builder itself, up to core 0.18, keeps two arguments from GPTModel, which takes them: rope_scaling_factor (then 8)
    and rotary_seq_len_interpolation_factor (then none).
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    config = transformer_config(args)
    spec = (
        get_gpt_decoder_block_spec(
            _with_plain_attention(config),
            use_transformer_engine=False,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=virtual_stage,
        )
        if args.num_experts or delta_net_oracle.layers(args)
        else get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    )
    custom_layers.adapt(spec, needs, args)
    sparse_oracle.put_into(spec, args)
    bases = args.rotary_base if isinstance(args.rotary_base, tuple) else (None, args.rotary_base)
    # What Megatron-Bridge's Gemma 3 calls a factor, core calls an interpolation factor.
    factor = (
        args.rope_scaling_factor
        if bases[0] is not None and args.position_embedding_type == "rope"
        else 1.0
    )
    mtp = None
    if args.mtp_num_layers:  # before delta nets are put in: what predicts further tokens attends, whatever the last layer does
        mtp = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, vp_stage=virtual_stage
        )
    delta_net_oracle.put_into(spec, args, config, virtual_stage)
    chunk = GPTModel(
        config=config,
        mtp_block_spec=mtp,
        transformer_layer_spec=spec,
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
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=bases[1],
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor
        or (None if factor == 1 else factor),
        vp_stage=virtual_stage,
    ).eval()
    if bases[0] is not None:
        custom_layers.give_windows_their_own_rope(chunk, args)
    if args.qk_l2_norm and args.no_rope_freq:
        custom_layers.norm_only_what_rotates(chunk, args)
    if chunk.post_process and getattr(args, "final_logit_softcapping", None):
        custom_layers.cap_logits(chunk, args.final_logit_softcapping)
    return chunk


def _with_plain_attention(config: "TransformerConfig") -> "TransformerConfig":
    """A copy without the variant of attention, whose layers are put in later. Core 0.19 makes no plain layer beside one."""
    plain = copy(config)
    plain.experimental_attention_variant = None
    return plain


def ranks_of(args: Namespace) -> int:
    """The smallest number of ranks that a layout can have."""
    tp = args.tensor_model_parallel_size
    of_experts = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size
    return int(args.pipeline_model_parallel_size * math.lcm(tp, of_experts))


@contextlib.contextmanager
def process_groups(
    args: Namespace, rank: int, rendezvous: Path, size: int | None = None
) -> Iterator[None]:
    """The groups of this layout, until the context ends. New ones for each job: groups left behind keep their threads.

    size: the number of ranks; None for WORLD.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size or WORLD,
        timeout=TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_stages(args),
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def own_file(version: Path, args: Namespace) -> Path:
    """This rank's, named as Megatron's get_checkpoint_name does."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if args.expert_model_parallel_size > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return version / name / "model_optim_rng.pt"


def load_distributed(version: Path, chunks: "Mapping[str, GPTModel]") -> dict[str, Any]:
    """This rank's share of a torch_dist checkpoint, resharded by Megatron; fails unless both have exactly the same keys."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    wanted = {name: chunk.sharded_state_dict() for name, chunk in chunks.items()}
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = dist_checkpointing.load(wanted, str(version), strict=StrictHandling.RAISE_ALL)
    assert isinstance(loaded, dict)
    return loaded


def save_distributed(target: Path, chunks: "list[GPTModel]") -> None:
    """Save this rank's share of a torch_dist checkpoint, as verl's MegatronCheckpointManager does.

    In a directory with NeMo's name: with the names and the head of NeMo-Aligner's reward models.
    """
    from megatron.core import dist_checkpointing

    save_without_cuda()
    names = [f"model{number}" for number in range(len(chunks))] if len(chunks) > 1 else ["model"]
    of_aligner = target.name == "model_weights"
    if of_aligner:
        score_oracle.as_aligner(chunks)
    prefix = "model." if of_aligner else ""
    state = {
        name: chunk.sharded_state_dict(prefix=prefix)
        for name, chunk in zip(names, chunks, strict=True)
    }
    dist_checkpointing.save(state, str(target))


def save_without_cuda() -> None:
    """Let Megatron save from the CPU. It measures its memory with psutil, and waits for copies from the GPU."""
    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._process_memory = lambda: 0
    torch.cuda.synchronize = lambda device=None: None


def load_chunks(args: Namespace, version: Path, *, further: bool) -> list[Any]:
    """This rank's virtual stages with their weights; names have to match exactly, and dtypes those that args give."""
    stages = virtual_stages(args)
    built = {
        f"model{'' if stage is None else stage}": build(
            args, stage, custom_layers.needs_of(version.parent)
        )
        for stage in (range(stages) if stages else [None])
    }
    for chunk in built.values():
        score_oracle.replace_head(chunk, version.parent)
    distributed = (version / "metadata.json").exists()
    state = (
        load_distributed(version, built) if distributed else read_rank_file(own_file(version, args))
    )
    chunks = []
    for name, chunk in built.items():
        weights = state[name]
        found = {value.dtype for name, value in weights.items() if value is not None}
        assert found <= {args.params_dtype}, f"args say {args.params_dtype}, the file has {found}"
        chunk.load_state_dict(weights, strict=True)
        if args.layernorm_zero_centered_gamma:
            as_others_do(args, chunk)
        # Without labels, a model returns what its MTP layers predict after the main logits. With this number, core 0.16 looks
        # for labels in any case.
        chunk.config.mtp_num_layers = None
        if not further:
            chunk.mtp_process = False
        chunks.append(chunk)
    return chunks


def as_others_do(args: Namespace, chunk: "GPTModel") -> None:
    """Do the work that Megatron core leaves to other software.

    - Norms with zero-centered gamma are Apex's or Transformer Engine's: torch's, which run here, get the sum.
    - The scale of a Gemma's embedding is no part of GPTModel: Megatron-Bridge and NeMo multiply what the embedding gives, as
      here. The other models with zero-centered norms have LayerNorm.
    """
    import torch

    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if name.endswith(("layernorm.weight", "decoder.final_norm.weight")):
                parameter.add_(1)
    if chunk.pre_process and args.normalization == "RMSNorm" and not args.attention_output_gate:
        chunk.embedding.register_forward_hook(
            lambda module, inputs, output: output * args.hidden_size**0.5
        )


def forward(args: Namespace, chunks: list[Any], asked: Any) -> Any:
    """Through all stages of all ranks; returns what this rank's last stage makes of it: logits only on the last rank."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    if isinstance(asked, dict):
        inputs = encoder_oracle.call_arguments(asked)
    else:
        inputs = (asked, torch.arange(asked.shape[1]).expand_as(asked), None)
    tokens, output = inputs[0], torch.empty(0)
    for chunk in chunks:
        if not chunk.pre_process:
            received = torch.empty(
                tokens.shape[1], tokens.shape[0], args.hidden_size, dtype=args.params_dtype
            )
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(received)
        output = chunk(*inputs)
        if not chunk.post_process:
            dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return output


def answer(
    rank: int, checkpoint: Path, asked: Path, answered: Path, *, further: bool, saved: Path | None
) -> None:
    """One job: the last rank of the first group writes the logits. saved: where to save the model first; None: nowhere."""
    import torch
    from megatron.core import parallel_state

    version = version_directory(checkpoint)
    args = read_rank_file(
        min([*version.glob("common.pt"), *version.glob("mp_rank_*/model_optim_rng.pt")])
    )["args"]
    size = ranks_of(args)
    if rank >= size:
        return
    with process_groups(args, rank, answered.with_suffix(".rendezvous"), size), torch.no_grad():
        chunks = load_chunks(args, version, further=further)
        if saved is not None:
            save_distributed(saved, chunks)
        logits = forward(args, chunks, torch.load(asked))
        first_group = (
            parallel_state.get_tensor_model_parallel_rank()
            == parallel_state.get_data_parallel_rank()
            == 0
        )
        if parallel_state.is_pipeline_last_stage() and first_group:
            torch.save(logits, answered)


def serve(rank: int) -> None:
    """Answer jobs from standard input until it ends or one fails."""
    for line in sys.stdin:
        try:
            *paths, further, saved = json.loads(line)
            answer(rank, *map(Path, paths), further=further, saved=saved and Path(saved))
            reply = "done"
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
            raise
        finally:
            print(REPLY + json.dumps(reply), flush=True)


def fork_ranks(pipes: list[tuple[int, int]], directory: Path) -> None:
    """Fork a rank for each pair of pipes (its jobs, its replies), and end with the last one."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: F401  (the slow part of an answer)

    with run_on_cpu():
        gc.collect()
        gc.freeze()
        for rank, (jobs, replies) in enumerate(pipes):
            if os.fork():
                continue
            log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number, end in enumerate((jobs, replies, log)):
                os.dup2(end, number)
            for end in (end for ends in pipes for end in ends):
                os.close(end)
            serve(rank)
            return
    for end in (end for ends in pipes for end in ends):
        os.close(end)
    for _ in pipes:
        os.wait()


if __name__ == "__main__":
    fork_ranks(json.loads(sys.argv[1]), Path(sys.argv[2]))
