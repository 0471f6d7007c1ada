"""torchtitan's Qwen3, GPT-OSS and DeepSeek on two processes, on the CPU: one step, and its own checkpointer.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.titan_models save MODEL OUTPUT fused
    python -m torch.distributed.run --nproc-per-node 2 -m tests.titan_models load MODEL OUTPUT fused

`save` trains a step with random gradients and saves OUTPUT/checkpoint/step-1. It writes weights and optimizer to OUTPUT/state.pt, and
what torchtitan's adapter makes of the weights to OUTPUT/adapter.safetensors. `load` loads OUTPUT/made/step-1, and writes weights and
optimizer to OUTPUT/loaded.pt. MODEL has the config.json with the sizes. The last word is `fused` or `separate`, as in titan_oracle.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.models import deepseek_v3, gpt_oss, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention

_NORMAL = {"weight": torch.nn.init.normal_, "bias": torch.nn.init.normal_}


def _ends(found: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The parts of a model's configuration that are the same for all models."""
    dim, vocab = found["hidden_size"], found["vocab_size"]
    return {
        "dim": dim,
        "vocab_size": vocab,
        "tok_embeddings": Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=_NORMAL
        ),
        "norm": RMSNorm.Config(normalized_shape=dim, param_init=_NORMAL),
        "lm_head": Linear.Config(in_features=dim, out_features=vocab, param_init=_NORMAL),
        **more,
    }


def _attention(found: dict[str, Any], *, fused: bool) -> dict[str, Any]:
    return {
        "n_layers": found["num_hidden_layers"],
        "dim": found["hidden_size"],
        "n_heads": found["num_attention_heads"],
        "n_kv_heads": found["num_key_value_heads"],
        "fuse_qkv": fused,
        "attn_backend": "sdpa",
        "rope": CosSinRoPE.Config(dim=found["head_dim"], max_seq_len=64),
    }


def _qwen3(found: dict[str, Any], *, fused: bool) -> Any:
    layers = qwen3._build_qwen3_layers(
        **_attention(found, fused=fused),
        head_dim=found["head_dim"],
        hidden_dim=found["intermediate_size"],
    )
    return qwen3.Qwen3Model.Config(
        **_ends(found, layers=layers, enable_weight_tying=found["tie_word_embeddings"])
    )


def _qwen3_moe(found: dict[str, Any], *, fused: bool) -> Any:
    layers = qwen3._build_qwen3_moe_layers(
        **_attention(found, fused=fused),
        head_dim=found["head_dim"],
        moe_hidden_dim=found["moe_intermediate_size"],
        num_experts=found["num_local_experts"],
        top_k=found["num_experts_per_tok"],
        moe_comm_backend="standard",
    )
    return qwen3.Qwen3Model.Config(**_ends(found, layers=layers))


def _gpt_oss(found: dict[str, Any], *, fused: bool) -> Any:
    head_dim = found["head_dim"]
    own = gpt_oss._make_gptoss_attn_config
    gpt_oss._make_gptoss_attn_config = lambda **given: own(
        **given, n_heads=found["num_attention_heads"], n_kv_heads=found["num_key_value_heads"], head_dim=head_dim
    )  # fmt: skip
    layers = gpt_oss._build_gptoss_layers(
        dim=found["hidden_size"],
        n_layers=found["num_hidden_layers"],
        hidden_dim=found["intermediate_size"],
        num_experts=found["num_local_experts"],
        top_k=found["num_experts_per_tok"],
        load_balance_coeff=1e-3,
        attn_backend="sdpa",
        fuse_qkv=fused,
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=64),
    )
    return gpt_oss.GptOssModel.Config(**_ends(found, layers=layers))


def _deepseek(found: dict[str, Any], *, fused: bool) -> Any:
    del fused  # latent attention has no such parameter
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=found["num_hidden_layers"],
        n_dense_layers=found["first_k_dense_replace"],
        dim=found["hidden_size"],
        n_heads=found["num_attention_heads"],
        q_lora_rank=found["q_lora_rank"] or 0,
        kv_lora_rank=found["kv_lora_rank"],
        qk_nope_head_dim=found["qk_nope_head_dim"],
        qk_rope_head_dim=found["qk_rope_head_dim"],
        v_head_dim=found["v_head_dim"],
        mscale=1.0,
        dense_hidden_dim=found["intermediate_size"],
        moe_hidden_dim=found["moe_intermediate_size"],
        num_experts=found["n_routed_experts"],
        num_shared_experts=found["n_shared_experts"],
        router_top_k=found["num_experts_per_tok"],
        router_score_func="sigmoid",
        attn_backend="sdpa",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=found["qk_rope_head_dim"], max_seq_len=64),
    )
    further = found.get("num_nextn_predict_layers") or 0
    mtp = deepseek_v3._build_mtp_layers(
        layers[-1], dim=found["hidden_size"], num_mtp_layers=further
    )
    return deepseek_v3.DeepSeekV3Model.Config(**_ends(found, layers=layers, mtp_layers=mtp))


_OF_QWEN3 = (_qwen3, qwen3.Qwen3StateDictAdapter)
_OF_DEEPSEEK = (_deepseek, deepseek_v3.DeepSeekV3StateDictAdapter)
_MODELS: dict[str, Any] = {
    "qwen3": _OF_QWEN3,
    "qwen3_moe": (_qwen3_moe, qwen3.Qwen3StateDictAdapter),
    "gpt_oss": (_gpt_oss, gpt_oss.GptOssStateDictAdapter),
    "deepseek_v2": _OF_DEEPSEEK,
    "deepseek_v3": _OF_DEEPSEEK,
}
"""model_type of a config.json -> (the function that makes torchtitan's configuration, torchtitan's adapter)."""


class Run:
    """A model, sharded over all processes, its optimizer and torchtitan's checkpointer."""

    def __init__(self, directory: Path, checkpoints: Path, *, fused: bool, seed: int) -> None:
        for module in (qwen3, gpt_oss, deepseek_v3):
            # Attention without masks, the only kind of torchtitan's that the CPU computes.
            module.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
        found = json.loads((directory / "config.json").read_text())
        make, adapter = _MODELS[found["model_type"]]
        config = make(found, fused=fused)
        self.adapter = adapter(config, None)
        self.model: Any = config.build()
        torch.manual_seed(seed)
        self.model.init_states(buffer_device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in self.model.parameters():
                torch.nn.init.normal_(parameter)
        for layer in [*self.model.layers.values(), *(getattr(self.model, "mtp_layers", None) or ())]:  # fmt: skip
            fully_shard(layer)
        fully_shard(self.model)
        kwargs = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-7}
        groups = [
            ParamGroupConfig(
                pattern=pattern,
                optimizer_name="AdamW",
                optimizer_kwargs={**kwargs, "weight_decay": decay},
            )
            for pattern, decay in (("norm|bias|sinks", 0.0), (".*", 0.1))
        ]
        self.optimizers = OptimizersContainer.Config(
            param_groups=groups, implementation="fused"
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.checkpoints = CheckpointManager.Config(
            enable=True,
            folder=str(checkpoints),
            interval=1,
            exclude_from_loading=["dataloader"],
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self) -> None:
        """One step with random gradients."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizers.step()
        self.schedulers.step()
        self.step += 1

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.model.state_dict()
        return {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
            for name, each in state.items()
        }

    def write(self, path: Path) -> None:
        """Write weights and optimizer as whole tensors."""
        weights = self.weights()
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        (optimizer,) = self.optimizers.optimizers
        moments = get_optimizer_state_dict(self.model, optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save({"weights": weights, "optimizer": moments, "step": self.step}, path)


def main(command: str, directory: Path, output: Path, qkv: str) -> None:
    dist.init_process_group("gloo")
    is_new = command == "save"
    checkpoints = output / ("checkpoint" if is_new else "made")
    run = Run(directory, checkpoints, fused=qkv == "fused", seed=1 if is_new else 2)
    if is_new:
        run.train()
        assert run.checkpoints.save(run.step)
        weights = run.weights()
        if dist.get_rank() == 0:
            found = run.adapter.to_hf(dict(weights))
            copies = {name: each.clone().contiguous() for name, each in found.items()}
            save_file(copies, output / "adapter.safetensors")
        run.write(output / "state.pt")
    else:
        assert run.checkpoints.load()
        run.write(output / "loaded.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
