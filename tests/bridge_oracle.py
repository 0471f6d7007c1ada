"""Megatron-Bridge itself, run on the CPU in an environment of its own: loads checkpoints and answers with their logits.

    python -m tests.bridge_oracle tokens.npy CHECKPOINT ...       writes CHECKPOINT.npy, and one line about each

What Bridge requires of a GPU's packages is replaced by empty modules when it is imported, never where Megatron core looks for
them: it finds none, as on any CPU. The model is built by Bridge's own load_megatron_model from run_config.yaml, with core's local
layers where the checkpoint asks for Transformer Engine's; common.pt, train_state.pt and all tensors are read by its own code.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

REPLACED = (
    *(
        "transformer_engine",
        "triton",
        "mamba_ssm",
        "causal_conv1d",
        "fla",
        "nvidia_resiliency_ext",
        "modelopt",
    ),
    *("datasets", "qwen_vl_utils", "timm", "open_clip", "wandb", "mlflow", "megatron.energon"),
)
"""Packages for a GPU, and for what is not called here."""
REPLY = "bridge-oracle "


class _Anything:
    """Called as a decorator, or to make one, it leaves what it is given as it is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return (
            args[0] if len(args) == 1 and callable(args[0]) and not kwargs else object.__new__(cls)
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, decorated: Any) -> Any:
        return decorated


class _Class(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _Class(name, (_Anything,), {}))
        return cls.__dict__[name]


class _Module(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Class(name, (_Anything,), {}))
        return self.__dict__[name]


class _Replacing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, *replaced: str) -> None:
        self.replaced = replaced

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        replaced = any(name == each or name.startswith(f"{each}.") for each in self.replaced)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if replaced else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_bridge(*, engine: bool = False) -> None:
    """Core first, so that what it makes of packages that are missing isn't changed by their replacements.

    engine: core finds the stand-in for Transformer Engine (engine_on_cpu.py), and builds its layers.
    """
    if engine:
        _import_engine()
    for name in (
        "extensions.transformer_engine",
        "transformer.transformer_block",
        "models.gpt.gpt_layer_specs",
    ):
        importlib.import_module(f"megatron.core.{name}")
    sys.meta_path.append(_Replacing(*REPLACED))
    importlib.import_module("megatron.bridge.training.model_load_save")
    importlib.import_module(
        "megatron.bridge.peft.utils"
    ).HAVE_TE = engine  # it asks whether names are there, not what they are


def _import_engine() -> None:
    """Megatron core finds Transformer Engine's layers, and nothing else of it that does anything."""
    from tests.engine_on_cpu import PARTS, VERSION

    sys.meta_path.append(_Replacing("transformer_engine"))
    package = importlib.import_module("transformer_engine")
    package.__version__ = VERSION  # type: ignore[attr-defined]
    for name, contents in PARTS.items():
        module = importlib.import_module(f"transformer_engine.{name}")
        for each in contents:
            setattr(module, each.__name__, each)


def answer(checkpoint: Path, tokens: Path, logits: Path) -> dict[str, Any]:
    """Writes float32 [batch, sequence, padded vocabulary]. Returns what Bridge made of the rest of the checkpoint."""
    import numpy as np
    import torch
    from megatron.bridge.training import checkpointing, model_load_save
    from megatron.bridge.training.utils.checkpoint_utils import read_train_state

    from tests.megatron_oracle import run_on_cpu

    iteration, release = checkpointing._resolve_checkpoint_iteration(str(checkpoint), None)
    version = checkpointing.get_checkpoint_name(str(checkpoint), iteration, release)
    state = read_train_state(checkpointing.get_checkpoint_train_state_filename(version))
    common = checkpointing.dist_checkpointing.load_common_state_dict(version)
    provider, _ = model_load_save.load_model_config(version)
    overrides = answer_overrides(provider)
    with (
        run_on_cpu(),
        torch.no_grad(),
        model_load_save.temporary_distributed_context(backend="gloo"),
    ):
        (model,) = model_load_save.load_megatron_model(
            version, use_cpu_init=True, mp_overrides=overrides
        )
        ids = torch.from_numpy(np.load(tokens))
        found = model.eval()(ids, torch.arange(ids.shape[1]).repeat(len(ids), 1), None)
    np.save(logits, found.float().numpy())
    return {
        "provider": type(provider).__name__,
        "step": state.step,
        "samples": state.consumed_train_samples,
        "content": checkpointing.dist_checkpointing.load_content_metadata(
            preloaded_state_dict=common
        ),
        "tokens": _tokens(version),
    }


def _tokens(version: str) -> list[int] | None:
    """The tokens of a text, by the tokenizer that Bridge finds in the checkpoint; None if there is none."""
    from megatron.bridge.training import model_load_save

    if not (Path(version) / "tokenizer").is_dir():
        return None
    return list(model_load_save.load_tokenizer(version).tokenize("ab ba"))


def answer_overrides(provider: Any) -> dict[str, Any]:
    """Settings of a provider with which its model runs on a CPU."""
    return {
        **{"transformer_layer_spec": _local(provider), "gradient_accumulation_fusion": False},
        **{
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "transformer_impl": "local",
        },
        **{
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
        },
    }


def _local(provider: Any) -> Any:
    """The layers that the checkpoint names, of core's own modules."""
    named = provider.transformer_layer_spec
    return partial(named.func, *named.args, **{**named.keywords, "use_transformer_engine": False})


def reply_of(answered: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The reply to a job, or its error."""
    from torch.distributed.checkpoint.api import CheckpointException

    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # core remembers the attention of the previous model there
    try:
        return answered()
    except (Exception, CheckpointException) as error:
        trace = traceback.format_exc()[-3000:]
        return {"failed": f"{type(error).__name__}: {error}", "trace": trace}


def send(reply: dict[str, Any]) -> None:
    """Write the line that bridge_process.py reads."""
    print("\n" + REPLY + json.dumps(reply), flush=True)


def answer_jobs(
    jobs: Sequence[dict[str, Any]],
    rank: int,
    answered: Callable[[dict[str, Any], int], dict[str, Any]],
) -> None:
    """Answer each job with answered(job, its number). Rank 0 replies; another rank does only if it fails."""
    for number, job in enumerate(jobs):
        reply = reply_of(partial(answered, job, number))
        if rank == 0 or "failed" in reply:
            send(reply | {"job": number, "rank": rank})


if __name__ == "__main__":
    import_bridge()
    tokens = Path(sys.argv[1])
    for each in map(Path, sys.argv[2:]):
        send(reply_of(partial(answer, each, tokens, each.with_name(f"{each.name}.npy"))))
