"""torchtitan's own checkpointer, model, optimizers and schedule on two processes, on the CPU.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.titan_oracle MODEL OUTPUT fused

A run saves OUTPUT/checkpoint/step-3 and goes on. `OUTPUT/convert.py`, which the test wrote, makes OUTPUT/made/step-3 of it. Another run
goes on from there. Both write losses and weights, to OUTPUT/uninterrupted and OUTPUT/continued. MODEL gives the sizes.
The last word is `fused`, torchtitan's default for Llama 3, or `separate`: the parameters for q, k and v.

torchtitan's trainer needs a GPU: this file shards the model with FSDP 2 itself, and takes the loss.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention

from tests import torch_runs

_ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-7}
TOTAL_STEPS = 20


def model_config(directory: Path, *, fuse_qkv: bool) -> llama3.Llama3Model.Config:
    """torchtitan's configuration of a Llama."""
    found = json.loads((directory / "config.json").read_text())
    dim, vocab = found["hidden_size"], found["vocab_size"]
    heads, norm = (
        found["num_attention_heads"],
        {"normalized_shape": dim, "eps": found["rms_norm_eps"]},
    )
    # Attention without masks, the only kind of torchtitan's that the CPU computes.
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    layers = llama3._build_llama3_layers(
        n_layers=found["num_hidden_layers"],
        dim=dim,
        n_heads=heads,
        n_kv_heads=found["num_key_value_heads"],
        hidden_dim=found["intermediate_size"],
        rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=10_000),
        fuse_qkv=fuse_qkv,
        attn_backend="sdpa",
    )
    for layer in layers:
        layer.attention_norm = layer.ffn_norm = _norm(norm)
    return llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=_norm(norm),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)
        ),
        layers=layers,
    )


def _norm(sizes: dict[str, Any]) -> RMSNorm.Config:
    return RMSNorm.Config(**sizes, param_init=llama3._NORM_INIT)


class Run:
    """A model, sharded over all processes, and torchtitan's objects around it. `train_state` of its checkpoints."""

    def __init__(self, directory: Path, checkpoints: Path, *, fuse_qkv: bool) -> None:
        config = model_config(directory, fuse_qkv=fuse_qkv)
        self.vocab, self.step, self.ntokens_seen = config.vocab_size, 0, 0
        self.model: Any = config.build()
        torch.manual_seed(1)
        self.model.init_states(buffer_device=torch.device("cpu"))
        for layer in self.model.layers.values():
            fully_shard(layer)
        fully_shard(self.model)
        # Vectors don't decay, as in Megatron.
        groups = [
            ParamGroupConfig(
                pattern=pattern,
                optimizer_name="AdamW",
                optimizer_kwargs={**_ADAM, "weight_decay": weight_decay},
            )
            for pattern, weight_decay in (("norm", 0.0), (".*", 0.1))
        ]
        self.optimizers = OptimizersContainer.Config(
            param_groups=groups, implementation="fused"
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2, min_lr_factor=0.1).build(
            optimizers=self.optimizers, training_steps=TOTAL_STEPS
        )
        self.checkpoints = CheckpointManager.Config(
            enable=True,
            folder=str(checkpoints),
            interval=torch_runs.BEFORE,
            exclude_from_loading=["dataloader"],
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that torchtitan's trainer saves of itself."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = torch_runs.tokens(self.step, dist.get_rank(), dist.get_world_size(), self.vocab)
            logits = self.model(ids[:, :-1]).flatten(0, 1).float()
            loss = functional.cross_entropy(logits, ids[:, 1:].flatten())
            loss.backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.step += 1
            self.ntokens_seen += ids.numel()
            losses.append(loss.item())
        return losses

    def finish(self, output: Path) -> None:
        losses = self.train(torch_runs.AFTER)
        weights = {name: each.full_tensor() for name, each in self.model.state_dict().items()}
        if dist.get_rank() == 0:
            torch_runs.write(output, losses, weights)


def main(directory: Path, output: Path, qkv: str) -> None:
    dist.init_process_group("gloo")
    fused = qkv == "fused"
    run = Run(directory, output / "checkpoint", fuse_qkv=fused)
    run.train(torch_runs.BEFORE)
    assert run.checkpoints.save(run.step)
    run.finish(output / "uninterrupted")
    if dist.get_rank() == 0:
        subprocess.run([sys.executable, output / "convert.py"], check=True)
    dist.barrier()
    other = Run(directory, output / "made", fuse_qkv=fused)
    assert other.checkpoints.load()
    assert other.step == torch_runs.BEFORE
    other.finish(output / "continued")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
