"""Statistics of activations of a Llama, measured with transformers: an oracle for calibrations, with AWQ's search.

The formulas are those of nvidia-modelopt 0.47 (model_calib.py).
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import megaconv

ALPHAS = [step / 10 for step in range(11)]


def measured(model: nn.Module, batches: list[Tensor], *, awq: bool = False) -> dict[str, Tensor]:
    """The statistics of all matrices of the layers, by the names of a calibration."""
    inputs: dict[str, list[Tensor]] = {}
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name != "lm_head"
    }
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].detach())
        )
        for name, module in modules.items()
    ]
    keys, values = [], []
    with torch.no_grad():
        for batch in batches:
            cache = model(batch, use_cache=True).past_key_values
            keys.append([layer.keys for layer in cache.layers])
            values.append([layer.values for layer in cache.layers])
    for hook in hooks:
        hook.remove()
    found: dict[str, Tensor] = {}
    for name, each in inputs.items():
        rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in each]).float()
        found[f"{name}.input_amax"] = rows.abs().max()
        found[f"{name}.input_channel_amax"] = rows.abs().amax(0)
        found[f"{name}.input_channel_mean"] = rows.abs().mean(0)
        found[f"{name}.input_channel_square"] = rows.square().mean(0)
        if awq:
            found[f"{name}.awq_scale"] = awq_scale(modules[name].weight.detach(), each)
    for layer in range(len(keys[0])):
        attention = f"model.layers.{layer}.self_attn"
        largest_key = max(batch[layer].abs().max() for batch in keys)
        largest_value = max(batch[layer].abs().max() for batch in values)
        found[f"{attention}.k_proj.k_amax"] = largest_key.float()
        found[f"{attention}.v_proj.v_amax"] = largest_value.float()
    return {name: tensor.contiguous() for name, tensor in found.items()}


def awq_scale(weight: Tensor, inputs: list[Tensor]) -> Tensor:
    """The factors of the alpha with the least error."""
    grouped = weight.reshape(-1, 128)
    tiny = torch.finfo(weight.dtype).tiny
    of_weight = (grouped.abs() / (grouped.abs().amax(1, keepdim=True) + tiny)).view(weight.shape)
    s_w = of_weight.mean(0).float()
    s_x = sum(x.abs().reshape(-1, x.shape[-1]).mean(0).float() for x in inputs) / len(inputs)
    losses = {}
    for alpha in ALPHAS:
        scale = scale_at(alpha, s_x, s_w)
        rounded = int4(weight * scale.to(weight.dtype))
        losses[alpha] = sum(
            float((((x * (1 / scale).to(x.dtype)) @ rounded.t()) - x @ weight.t()).float().pow(2).mean())
            for x in inputs
        )  # fmt: skip
    return scale_at(min(losses, key=losses.__getitem__), s_x, s_w)


def scale_at(alpha: float, s_x: Tensor, s_w: Tensor) -> Tensor:
    scale = (s_x.pow(alpha) / (s_w.pow(1 - alpha) + 1e-38)).clamp(1e-4, 1e4)
    return scale / (scale.max() * scale.min()).sqrt()


def int4(weight: Tensor) -> Tensor:
    """The weight, quantized to INT4 by groups of 128 and dequantized."""
    grouped = weight.reshape(-1, 128).float()
    scale = grouped.abs().amax(1, keepdim=True) / 7
    scale[scale == 0] = 1
    made = (grouped / scale).round().clamp(-8, 7) * scale
    return made.reshape(weight.shape).to(weight.dtype)


def write_statistics(path: Path, tensors: dict[str, Tensor], source: Path) -> Path:
    """Write a file of statistics for the weights of a checkpoint."""
    fingerprint = megaconv.fingerprint(source).weights
    save_file(tensors, path, metadata={"weights_fingerprint": fingerprint})
    return path
