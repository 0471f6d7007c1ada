"""`megaconv plan`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.units import readable
from megaconv.errors import UsageError
from megaconv.local_paths import local_path, require_page
from megaconv.model.ceilings import COUNT
from megaconv.options import LoadOptions
from megaconv.planning.gpus import DEFAULT_GPU
from megaconv.terminal import show

if TYPE_CHECKING:
    from megaconv.commands.best_layouts import BestLayouts
    from megaconv.commands.layouts import Layouts
    from megaconv.commands.served_layouts import ServedLayouts

Dispatcher = Literal["alltoall", "flex"]
Purpose = Literal["train", "finetune", "lora", "infer"]
CacheDtype = Literal["auto", "fp8"]
ONLY_TRAINED = {
    "vpp": "--vpp", "etp": "--etp", "cp": "--cp", "micro_batch": "--micro-batch-size",
}  # fmt: skip
"""Sizes that only a training run has -> their flags."""
_OF_EXPERTS = {"ep": "--ep", "etp": "--etp"}
"""Sizes that only a model with experts has -> their flags."""


def _size(flag: str, what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        flag, min=1, max=COUNT, help=f"Only layouts with this {what}."
    )
    return option


@command(
    epilog="Example: megaconv plan DeepSeek-V3 --gpus 2048 --gpu h800 --seq-length 4096 --global-batch-size 15360"
)
def plan(
    *,
    path: opt.Input,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=1,
            max=COUNT,
            help="GPUs of the run; as few as hold the model once by default.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Kind of GPU, such as h100, h800 or a100."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, such as 80GiB."),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option("--seq-length", min=1, max=COUNT, help="Tokens of a sequence.")
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option("--global-batch-size", min=1, max=COUNT, help="Sequences of a step."),
    ] = None,
    purpose: Annotated[
        Purpose,
        typer.Option(
            "--for", help="Train all weights, or only adapters (lora); or serve the model."
        ),
    ] = "train",
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Products with the layers' weights are FP8.")
    ] = False,
    dispatcher: Annotated[
        Dispatcher,
        typer.Option(
            "--moe-token-dispatcher-type",
            help="Exchange of experts' tokens; flex is Megatron-LM's with DeepEP.",
        ),
    ] = "alltoall",
    overlap_experts: Annotated[
        bool,
        typer.Option(
            "--overlap-moe-expert-parallel-comm",
            help="Exchange of experts' tokens is hidden; only Megatron-LM can.",
        ),
    ] = False,
    tp: Annotated[int | None, _size("--tp", "tensor-parallel size")] = None,
    pp: Annotated[int | None, _size("--pp", "pipeline-parallel size")] = None,
    vpp: Annotated[int | None, _size("--vpp", "number of virtual stages")] = None,
    ep: Annotated[int | None, _size("--ep", "expert-parallel size")] = None,
    etp: Annotated[int | None, _size("--etp", "expert tensor-parallel size")] = None,
    cp: Annotated[int | None, _size("--cp", "context-parallel size")] = None,
    micro_batch_size: Annotated[int | None, _size("--micro-batch-size", "microbatch")] = None,
    cache: Annotated[
        CacheDtype,
        typer.Option("--kv-cache-dtype", help="With --for infer: dtype of cached keys and values."),
    ] = "auto",
    top: Annotated[int, typer.Option("--top", min=1, help="Layouts to show.")] = 10,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            parser=local_path,
            metavar="FILE",
            help="Write a page for a browser, with bars of memory and time and the pipeline's schedule.",
        ),
    ] = None,
    loader: str | None,
    load: LoadOptions,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """List the parallel layouts that a model can have, with the memory that each needs for training.

    With --seq-length and --global-batch-size, the layouts are ranked by the estimated time of a step. Without them, the
    memory is that of weights, gradients and optimizer state with Megatron's distributed optimizer, without activations.
    With --for infer, the layouts of a server are ranked by the tokens that it generates in a second.
    PATH may also be a config.json, or a directory with nothing but one.
    """
    from formats.whole_file import write_whole
    from megaconv.commands.inspection import inspect
    from megaconv.commands.layouts import LISTED, layouts
    from megaconv.commands.searched_layouts import layouts_for_serving, layouts_for_training
    from megaconv.commands.views.plan_page import plan_page
    from megaconv.options.values import byte_size

    fixed = {
        "tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "cp": cp, "micro_batch": micro_batch_size,
    }  # fmt: skip
    given = {name: size for name, size in fixed.items() if size is not None}
    of_experts = [
        f"{_OF_EXPERTS[name]} {given[name]}" for name in _OF_EXPERTS if given.get(name, 1) > 1
    ]
    of_exchange = _flags_of_exchange(overlap_experts=overlap_experts, dispatcher=dispatcher)
    if purpose == "infer":
        _refuse_training_flags(given, of_exchange)
    elif cache != "auto":
        raise UsageError(f"--kv-cache-dtype {cache} needs --for infer")
    of_a_run = given.keys() - set(LISTED) if gpus is None else given
    of_training = fp8 or purpose == "lora" or of_exchange
    searches = seq_length or global_batch_size or gpu or of_a_run or of_training
    if searches and gpus is None and purpose != "infer":
        raise UsageError("--gpus is missing: the time of a step depends on the number of GPUs")
    if html is not None:
        require_page("--html", html)
    memory = None if gpu_memory is None else byte_size(gpu_memory, "--gpu-memory ")
    header = inspect(path, replace(load, optimizer=False), loader, check_source=False).header
    if not header.config.experts.count and (of_experts or of_exchange):
        raise UsageError(
            f"{(of_experts + of_exchange)[0]}: this model has no experts; leave it out"
        )
    found: Layouts | BestLayouts | ServedLayouts
    if purpose == "infer":
        found = layouts_for_serving(
            header, gpus=gpus, gpu=gpu or DEFAULT_GPU, gpu_memory=memory, seq_length=seq_length,
            sequences=global_batch_size, fixed=given, top=top, fp8=fp8, cache=cache,
        )  # fmt: skip
    elif searches and gpus is not None:
        found = layouts_for_training(
            header, gpus=gpus, gpu=gpu or DEFAULT_GPU, gpu_memory=memory, seq_length=seq_length,
            global_batch_size=global_batch_size, fixed=given, top=top, fp8=fp8, adapters=purpose == "lora",
            overlap_experts=overlap_experts, dispatcher=dispatcher,
        )  # fmt: skip
    else:
        found = layouts(header, gpus, memory, given)
    if html is not None:
        write_whole(html, plan_page(path, found).encode())
    if as_json:
        print_json(found.to_json())
        return
    for line in found.lines():
        show(line)
    if html is not None:
        show(f"{html}: {readable(html.stat().st_size)}")


def _flags_of_exchange(*, overlap_experts: bool, dispatcher: Dispatcher) -> list[str]:
    """The given flags about the exchange of experts' tokens."""
    flags = []
    if overlap_experts:
        flags.append("--overlap-moe-expert-parallel-comm")
    if dispatcher != "alltoall":
        flags.append("--moe-token-dispatcher-type")
    return flags


def _refuse_training_flags(given: dict[str, int], of_exchange: list[str]) -> None:
    """Raise UsageError for the first flag that only a training run has."""
    wrong = [flag for name, flag in ONLY_TRAINED.items() if name in given] + of_exchange
    if wrong:
        raise UsageError(f"{wrong[0]} is for training; leave it out with --for infer")
