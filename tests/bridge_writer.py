"""Megatron-Bridge itself makes checkpoints of Hugging Face models, on the CPU.

    python -m tests.bridge_writer [--engine] MODEL CHECKPOINT [MODEL CHECKPOINT ...]      one line about each

Its AutoBridge reads config.json and the weights, builds the model with core's local layers, and saves it as `import_ckpt` does:
torch_dist, run_config.yaml, train_state.pt and the tokenizer. --engine: the layers that its provider names, with the stand-in
for Transformer Engine.
"""

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from tests.bridge_oracle import REPLY, import_bridge

ENGINE = "--engine"
SETTINGS = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "use_cpu_initialization": True,
}
"""Settings with which a model runs on a CPU."""


OF_THE_ENGINE = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
"""The settings that differ with the stand-in for Transformer Engine."""


def write(model: Path, checkpoint: Path, *, engine: bool = False) -> None:
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import model_load_save
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tests.megatron_oracle import run_on_cpu

    bridge = AutoBridge.from_hf_pretrained(model, dtype=torch.float32)
    provider = bridge.to_megatron_provider()
    for name, value in (SETTINGS | (OF_THE_ENGINE if engine else {})).items():
        setattr(provider, name, value)
    if not engine:
        provider.transformer_layer_spec = partial(
            get_gpt_decoder_block_spec, use_transformer_engine=False
        )
    _replace_calls_of_the_gpu(engine=engine)
    with run_on_cpu(), model_load_save.temporary_distributed_context(backend="gloo"):
        provider.finalize()
        chunks = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True
        )
        tokenizer = model if (model / "tokenizer.json").is_file() else None
        bridge.save_megatron_model(chunks, checkpoint, hf_tokenizer_path=tokenizer)


def _replace_calls_of_the_gpu(*, engine: bool) -> None:
    import torch
    from megatron.core.models.gpt import gpt_layer_specs

    torch.cuda.get_rng_state = torch.get_rng_state  # Bridge asks for it, and doesn't save it
    torch.cuda.synchronize = lambda: None
    if engine:
        return
    layers_of_mtp = gpt_layer_specs.get_gpt_mtp_block_spec

    def local(*given: Any, use_transformer_engine: bool, **options: Any) -> Any:
        return layers_of_mtp(*given, use_transformer_engine=False, **options)

    gpt_layer_specs.get_gpt_mtp_block_spec = local


def answer(model: Path, checkpoint: Path, *, engine: bool) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # core remembers the attention of the previous model there
    try:
        write(model, checkpoint, engine=engine)
    except Exception as error:
        return {
            "failed": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-3000:],
        }
    return {}


if __name__ == "__main__":
    words = sys.argv[1:]
    with_engine = words[0] == ENGINE
    import_bridge(engine=with_engine)
    __import__("megatron.bridge.models")
    paths = list(map(Path, words[1:] if with_engine else words))
    for each, target in zip(paths[::2], paths[1::2], strict=True):
        print("\n" + REPLY + json.dumps(answer(each, target, engine=with_engine)), flush=True)
