"""BERT and T5 as Megatron computes them, in a few lines of torch from canonical tensors.

Hidden states are [batch, sequence, hidden]. Layers norm what they are given; scores are divided by the square root of the head size.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from megaconv.checkpoint import Checkpoint

Masks = Tensor | None


class Forward:
    """The arithmetic of one checkpoint, in float32."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.tensors = {name: checkpoint.load(name).float() for name in checkpoint.tensors}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(
            x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply a norm. The input stays unchanged if the model has no such norm."""
        if f"{name}.weight" not in self.tensors:
            return x
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return layer_norm(x, (self.config.hidden,), weight, bias, self.config.norm.epsilon)

    def embed(self, tokens: Tensor) -> Tensor:
        return (
            self.tensors["embed.weight"][tokens]
            + self.tensors["positions.weight"][: tokens.shape[1]]
        )

    def attend(self, name: str, x: Tensor, to: Tensor, mask: Masks) -> Tensor:
        """mask: true where a token may look, None for everywhere."""
        heads = [
            self.linear(f"{name}.{word}", source)
            .unflatten(-1, (self.config.attention.heads, -1))
            .transpose(1, 2)
            for word, source in (("q", x), ("k", to), ("v", to))
        ]
        found = scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.linear(f"{name}.o", found.transpose(1, 2).flatten(2))

    def layer(self, name: str, x: Tensor, mask: Masks, memory: Tensor | None = None) -> Tensor:
        """memory: what a decoder attends to."""
        normed = self.norm(f"{name}.input_norm", x)
        carried = normed if self.config.has("post_norm") else x
        x = carried + self.attend(f"{name}.attn", normed, normed, mask)
        if memory is not None:
            x = x + self.attend(f"{name}.cross", self.norm(f"{name}.cross_norm", x), memory, None)
        normed = self.norm(f"{name}.mlp_norm", x)
        carried = normed if self.config.has("post_norm") else x
        return carried + self.linear(
            f"{name}.mlp.down", self.activate(self.linear(f"{name}.mlp.up", normed))
        )

    def activate(self, x: Tensor) -> Tensor:
        return gelu(x, approximate="tanh" if self.config.mlp.activation == "gelu_tanh" else "none")

    def head(self, x: Tensor) -> Tensor:
        return x @ self.tensors["embed.weight"].T + self.tensors["head.bias"]


def bert(
    checkpoint: Checkpoint, tokens: Tensor, may_look: Tensor, types: Tensor
) -> tuple[Tensor, Tensor]:
    """(logits [batch, sequence, vocabulary], logits of the binary head [batch, 2])."""
    model = Forward(checkpoint)
    x = model.embed(tokens) + model.tensors["token_types.weight"][types]
    for layer in range(model.config.layer_count):
        x = model.layer(f"encoder.layers.{layer}", x, may_look.bool()[:, None, None, :])
    x = model.norm("final_norm", x)
    approximate = "tanh" if model.config.head.activation == "gelu_tanh" else "none"
    transformed = model.norm(
        "transform.norm", gelu(model.linear("transform.dense", x), approximate=approximate)
    )
    return model.head(transformed), model.linear(
        "binary_head", model.linear("pooler", x[:, 0]).tanh()
    )


def t5(checkpoint: Checkpoint, tokens: Tensor, decoder_tokens: Tensor) -> Tensor:
    """Logits [batch, sequence of the decoder, vocabulary]; learned positions."""
    model, length = Forward(checkpoint), decoder_tokens.shape[1]
    x = model.embed(tokens)
    for layer in range(model.config.encoder.layers):
        x = model.layer(f"encoder.layers.{layer}", x, None)
    memory = model.norm("encoder.final_norm", x)
    x, causal = model.embed(decoder_tokens), torch.ones(length, length, dtype=torch.bool).tril()
    for layer in range(model.config.layer_count):
        x = model.layer(f"decoder.layers.{layer}", x, causal, memory)
    return model.head(model.norm("decoder.final_norm", x))
