"""Axes and values in which MLX's tensors differ from those of transformers' files.

    convolutions           [channels, width, 1] in place of [channels, 1, width]
    norms of Qwen3-Next    stored with 1 added
    activations (xIELU)    parameters without an axis
    GPT-OSS                gate and up apart, whose rows alternate in transformers' files

Source: the `sanitize` methods of mlx-lm 0.32.
"""

from collections.abc import Mapping
from math import prod

from formats.tensor import LazyTensor, Shape, reshaped
from megaconv.errors import TensorMismatch
from megaconv.values.added import AddedTensor
from megaconv.values.alternating import AlternatingRows
from megaconv.values.beside_weights import needed
from megaconv.values.cast import CastTensor

_WITH_SHIFTED_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_SHIFTED_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight"),
)
_SCALARS = (".act_fn.alpha_p", ".act_fn.alpha_n")


def is_shifted(family: str, name: str) -> bool:
    """True if MLX stores a tensor with 1 added."""
    return family in _WITH_SHIFTED_NORMS and name.endswith(_SHIFTED_NORMS)


def as_in_mlx(name: str, shape: Shape) -> Shape:
    """The shape in MLX of a tensor of transformers' shape.

    A convolution of each channel for itself is [channels, width, 1], and a parameter of an activation has no axis.
    """
    if name.endswith(_SCALARS):
        return ()
    is_convolution = len(shape) == 3 and shape[1] == 1
    return (shape[0], shape[2], 1) if is_convolution else shape


def undone(tensors: Mapping[str, LazyTensor], family: str, where: str) -> dict[str, LazyTensor]:
    """The tensors with the axes and the values of transformers' files, and GPT-OSS's gate and up joined.

    Raises TensorMismatch for a gate without an up of the same form.
    """
    # mlx-lm adds 1 to norms when it turns the convolutions around, and looks at the convolutions to know.
    is_plain = any(map(_is_convolution_of_transformers, tensors, tensors.values()))
    found = {
        name: _undone(name, tensor, shifted=is_shifted(family, name) and not is_plain)
        for name, tensor in tensors.items()
    }
    return _joined_experts(found, where) if family == "gpt_oss" else found


def _is_convolution_of_transformers(name: str, tensor: LazyTensor) -> bool:
    """True for [channels, 1, width]."""
    return name.endswith("conv1d.weight") and tuple(tensor.shape)[2:] not in ((), (1,))


def _undone(name: str, tensor: LazyTensor, *, shifted: bool) -> LazyTensor:
    shape = tuple(tensor.shape)
    if len(shape) == 3 and shape[2] == 1:  # a convolution of each channel for itself
        return reshaped(tensor, (shape[0], 1, shape[1]))
    if name.endswith(_SCALARS):
        return reshaped(tensor, (1,))
    if shifted:
        return CastTensor(AddedTensor(tensor, -1), tensor.dtype, name, overflow=False)
    return tensor


def _joined_experts(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """GPT-OSS's tensors by transformers' names."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        in_hf = name.removesuffix(".weight").replace(".bias", "_bias")
        if ".gate_proj" in name:
            up = needed(name.replace(".gate_proj", ".up_proj"), tensors, where)
            found[in_hf.replace(".gate_proj", ".gate_up_proj")] = _alternating(
                name, tensor, up, where
            )
        elif ".up_proj" not in name:
            found[in_hf] = tensor
    return found


def _alternating(name: str, gate: LazyTensor, up: LazyTensor, where: str) -> LazyTensor:
    """Gate and up of all experts [experts, rows, cols], or their biases [experts, rows], with alternating rows."""
    shape = tuple(gate.shape)
    if (tuple(up.shape), up.dtype) != (shape, gate.dtype) or not shape:
        raise TensorMismatch(
            f"{where}: {name} is {list(shape)} {gate.dtype}, and its up_proj is {list(up.shape)} {up.dtype}; expected the same "
            "shape with an axis of experts",
            code="misshapen-tensor",
        )
    if len(shape) == 3:
        return AlternatingRows(gate, up)
    columns = (prod(shape), 1)
    joined = AlternatingRows(reshaped(gate, columns), reshaped(up, columns))
    return reshaped(joined, (*shape[:-1], 2 * shape[-1]))
