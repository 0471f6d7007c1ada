"""Directories as Megatron-Bridge and NeMo 2 save them, made by hand around Megatron core's own torch_dist.

Neither software wrote them: which files there are and what stands in them is from their sources, and from a run_config.yaml that
Megatron-Bridge printed. The tensors are Megatron core's, whose saving both use.
"""

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from formats import pickle_guard, torch_zip
from formats.pickle_records import Opaque
from formats.pickle_writer import dumps
from formats.tensor import FileTensor, StridedTensor, read_tensor
from tests import swift_arguments
from tests.conftest import FIXTURES

ITERATION = "iter_0000010"
SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
BFLOAT16 = {"_target_": "torch.bfloat16", "_call_": False}
_GPT = {
    "parallel_output": True,
    "scatter_embedding_sequence_parallel": True,
    "should_pad_vocab": True,
    "generation_config": None,
    "transformer_layer_spec": {
        "_target_": "megatron.bridge.models.gpt_provider.default_layer_spec",
        "_call_": False,
    },
    "params_dtype": BFLOAT16,
    "pipeline_dtype": BFLOAT16,
    "init_method": {
        "_target_": "torch.nn.init.normal_",
        "_partial_": True,
        "_args_": [],
        "mean": 0.0,
        "std": 0.02,
    },
    "attention_backend": {
        "_target_": "megatron.core.transformer.enums.AttnBackend",
        "_call_": True,
        "_args_": [5],
    },
    "timers": {"_target_": "megatron.core.timers.Timers", "_call_": True},
    "window_size": None,
    "gated_linear_unit": True,
    "bias_activation_fusion": True,
    "seq_len_interpolation_factor": None,
    "mrope_section": None,
    "softmax_type": "vanilla",
}
"""The fields of every provider."""
_SAME = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    ),
    *(
        "normalization",
        "layernorm_epsilon",
        "position_embedding_type",
        "rotary_base",
        "rotary_percent",
    ),
    *(
        "rotary_interleaved",
        "qk_layernorm",
        "multi_latent_attention",
        "moe_router_topk",
        "moe_router_pre_softmax",
    ),
    *(
        "moe_router_score_function",
        "moe_router_load_balancing_type",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
    ),
    *(
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "add_bias_linear",
    ),
    *("make_vocab_size_divisible_by", "transformer_impl", "add_qkv_bias", "moe_grouped_gemm"),
)
"""Fields that Megatron-LM's arguments and providers call the same."""


def provider(args: Namespace, **changed: Any) -> dict[str, Any]:
    """The fields of a provider that says what a checkpoint's own args say."""
    fields = {name: getattr(args, name, None) for name in _SAME}
    fields |= {
        "seq_length": args.max_position_embeddings,
        "vocab_size": args.vocab_size
        + (args.tokenizer_type == "NullTokenizer"),  # Megatron-LM counts its end of text
        "num_moe_experts": args.num_experts,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "layernorm_zero_centered_gamma": False,
        "activation_func": SILU,
    }
    return _GPT | fields | changed


def own_args(fixture: str) -> Namespace:
    state = torch_zip.read(next((FIXTURES / fixture).rglob("common.pt")))
    assert isinstance(state, dict)
    args = state["args"]
    assert isinstance(args, Namespace)
    return args


def write_bridge(
    target: Path, fixture: str, settings: dict[str, Any] | None = None, **changed: Any
) -> Path:
    """changed: fields of the provider, with other values or new. settings: other sections of run_config.yaml."""
    version = _copy_without_args(fixture, target / ITERATION)
    for word in ("", "latest_"):
        file = (target if word else version) / f"{word}train_state.pt"
        torch.save(
            {
                "step": torch.tensor(10),
                "consumed_train_samples": torch.tensor(80, dtype=torch.int32),
            },
            file,
        )
    (target / "latest_checkpointed_iteration.txt").write_text("10")
    model = {"_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider"}
    described = {
        "model": model | provider(own_args(fixture), **changed),
        "peft": None,
        **(settings or {}),
    }
    (version / "run_config.yaml").write_text(yaml.safe_dump(described))
    return target


def write_nemo(target: Path, fixture: str, prefix: str = "module.", **changed: Any) -> Path:
    weights = _copy_without_args(fixture, target / "weights", global_step=10)
    prefix_keys(weights / ".metadata", prefix)
    model = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaConfig"}
    described = {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel",
        "config": model | provider(own_args(fixture), **changed),
        "tokenizer": {
            "_target_": "nemo.collections.common.tokenizers.AutoTokenizer",
            "pretrained_model_name": "a/b",
        },
    }
    (target / "context").mkdir()
    (target / "context" / "model.yaml").write_text(yaml.safe_dump(described))
    hostile = {
        "objects": {
            "model_1": {"type": {"module": "os", "name": "system"}, "arguments": ["touch done"]}
        }
    }
    (target / "context" / "io.json").write_text(json.dumps(hostile))
    return target


_OF_SWIFT = {
    "swift_version": "4.6.0",
    "model": "a/b",
    "model_dir": "/models/b",
    "model_info": {"model_type": "llama"},
    "tuner_type": "full",
    "torch_dtype": "float32",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "consumed_train_samples": 80,
}


def write_swift(
    target: Path,
    fixture: str = "dist-llama-tp2pp2",
    *,
    exported: Path | None = None,
    **changed: Any,
) -> Path:
    """The args that ms-swift's save_mcore_checkpoint stores: a namespace of plain values.

    exported: a Hugging Face directory whose config.json lies beside. changed: arguments with other values or new.
    """
    defaults = json.loads(swift_arguments.FILE.read_text())
    args = Namespace(**{**defaults, **_OF_SWIFT, **changed})
    _copy_without_args(fixture, target / ITERATION, args=args)
    (target / "args.json").write_text(json.dumps(vars(args)))
    (target / "latest_checkpointed_iteration.txt").write_text("10")
    if exported is not None:
        shutil.copy(exported / "config.json", target)
    return target


def write_automodel(model: Path, target: Path) -> None:
    """The weights of a run of NeMo AutoModel, whose writer is torch's HuggingFaceStorageWriter(save_distributed=True).

    model: a Hugging Face directory with model.safetensors.
    """
    described = target / ".hf_metadata"
    described.mkdir(parents=True)
    shutil.copy(model / "config.json", described / "config.json")
    (described / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    weights = load_file(model / "model.safetensors")
    offsets = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in weights.items()}
    header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
    save_file(weights, target / "shard-00001-model-00001-of-00001.safetensors", metadata=header)


def _copy_without_args(fixture: str, version: Path, **more: Any) -> Path:
    """Copy a checkpoint without its args. The rest of common.pt stays, with the optimizer."""
    shutil.copytree(next((FIXTURES / fixture).rglob("common.pt")).parent, version)
    state = torch_zip.read(version / "common.pt")
    assert isinstance(state, dict)
    torch.save(
        {
            name: _plain(value)
            for name, value in ({**state, "args": None} | more).items()
            if value is not None
        },
        version / "common.pt",
    )
    return version


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(inner) for inner in value)
    if isinstance(value, (FileTensor, StridedTensor)):
        return (
            torch.from_numpy(read_tensor(value))
            .view(getattr(torch, value.dtype))
            .reshape(value.shape)
        )
    return value


def prefix_keys(metadata: Path, prefix: str) -> None:
    """Other keys in `.metadata`, written anew as the inert records that it was read into."""
    top = pickle_guard.load(metadata.read_bytes(), source=str(metadata))
    assert isinstance(top, Opaque)
    assert isinstance(top.state, dict)
    top.state.pop("all_local_plans", None)
    for name in ("state_dict_metadata", "planner_data", "mcore_data"):
        if top.state.get(name):
            top.state[name] = {
                _prefixed(key, prefix): value for key, value in top.state[name].items()
            }
    for index in top.state["storage_data"]:
        index.state["fqn"] = _prefixed(index.state["fqn"], prefix)
    metadata.write_bytes(dumps(top)[0])


def _prefixed(key: str, prefix: str) -> str:
    if key.startswith("optimizer.state."):
        kind, rest = key.removeprefix("optimizer.state.").split(".", 1)
        return f"optimizer.state.{kind}.{prefix}{rest}"
    return key if key.startswith(("optimizer.", "rng_state", "chained_")) else prefix + key
