"""The scores of channels and heads are those computed from the inputs of transformers' matrices, in any passes."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.engine import Engine
from megatron_lite.forward.channel_scores import ChannelScores, measure
from tests import transformers_oracle as oracle
from tests.trainer.forward.test_expert_scores import ALL, ROWS, passes
from tests.trainer.forward.test_streaming import streamed, weights_of
from tests.trainer.parallel.small import Case, make_engine

FIELDS = ("hidden", "mlp.ffn", "experts.ffn", "experts.shared_ffn")
OF_HEADS = ("attention.heads", "mamba.heads", "linear.value_heads")
QUICK = ("apertus", "llama", "deepseek_v3")
EACH = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in (
        "apertus",
        "llama",
        "deepseek_v3",
        "qwen2_moe",
        "glm4_moe",
        "mixtral",
        "olmo2",
        "qwen3",
    )
]
READ_HIDDEN = (
    "q_proj", "q_a_proj", "kv_a_proj_with_mqa", "k_proj", "v_proj", "mlp.gate_proj", "mlp.up_proj", "shared_expert.gate_proj",
    "shared_experts.gate_proj", "shared_expert.up_proj", "shared_experts.up_proj",
)  # fmt: skip
"""The ends of the names of transformers' matrices that read hidden states, but for experts."""
FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Matrices that are a part of one matrix here, behind another one: their input is seen once."""


class Seen:
    """The inputs of transformers' matrices, of each text but its last token."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = oracle.load(directory)
        self.inputs: dict[str, list[Tensor]] = defaultdict(list)
        self.experts: dict[str, list[Any]] = defaultdict(list)
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(
                    lambda _, given, name=name: self.inputs[name].append(given[0].flatten(0, -2))
                )
            elif name.endswith(".experts"):
                module.register_forward_pre_hook(
                    lambda _, given, name=name: self.experts[name].append(given)
                )
        for row in ROWS:
            oracle.compute(self.model, torch.tensor([row[:-1]]))

    def of_matrix(self, name: str) -> Tensor:
        """The scores of the columns of a matrix."""
        weight = self.model.get_submodule(name).weight
        return torch.cat(self.inputs[name]).norm(dim=0) * weight.norm(dim=0)

    def of_expert(self, name: str, expert: int) -> Tensor:
        module = self.model.get_submodule(name)
        activations = []
        for x, chosen, weights in self.experts[name]:
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], module.gate_up_proj[expert]).chunk(2, -1)
            activations.append(module.act_fn(gate) * up * weights[token, place].unsqueeze(1))
        norms, columns = torch.cat(activations).norm(dim=0), module.down_proj[expert].norm(dim=0)
        return norms * columns if any(map(len, activations)) else columns

    def of_heads(self, name: str) -> Tensor:
        """The scores of heads, from what each adds to the output of a matrix."""
        heads = self.model.config.num_attention_heads
        inputs = torch.cat(self.inputs[name]).unflatten(1, (heads, -1))
        weight = self.model.get_submodule(name).weight.unflatten(1, (heads, -1))
        return torch.einsum("thd,ohd->hto", inputs, weight).flatten(1).norm(dim=1)

    def of_hidden(self) -> Tensor:
        sublayers: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        for name, inputs in self.inputs.items():
            words = name.split(".")
            first = FUSED.get(words[-1])
            is_second = first is not None and ".".join([*words[:-1], first]) in self.inputs
            if name.endswith(READ_HIDDEN) and not is_second:
                sublayers[words[2], words[3]].append(torch.cat(inputs).square().sum(0))
        for name, calls in self.experts.items():
            words = name.split(".")
            rows = torch.cat([x.repeat_interleave(chosen.shape[1], 0) for x, chosen, _ in calls])
            sublayers[words[2], words[3]].append(rows.square().sum(0))
        roots = [torch.stack(sums).sum(0).sqrt() for sums in sublayers.values()]
        return torch.stack([each / each.sum() for each in roots]).sum(0)

    def expected(self, place_here: str) -> Tensor:
        words = place_here.split(".")
        if words[2] == "attn":
            return self.of_heads(f"model.layers.{words[1]}.self_attn.o_proj")
        place = f"model.layers.{words[1]}.mlp"
        if words[3:4] == ["experts"]:
            return self.of_expert(f"{place}.experts", int(words[4]))
        shared = [
            name
            for name in self.inputs
            if name.startswith(f"{place}.shared") and name.endswith("down_proj")
        ]
        return self.of_matrix(shared[0] if words[3:] else f"{place}.down_proj")


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_scores_are_those_of_transformers_inputs(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path)
    seen = Seen(tmp_path)
    for together in (1, len(ROWS)):
        engine = streamed(*weights_of(tmp_path))
        found = measure(engine, passes(engine, together), [*FIELDS, *OF_HEADS])
        assert found.tokens == sum(len(row) - 1 for row in ROWS)
        of_layers = {
            place: scores for place, scores in found.scores.items() if place.startswith("layers.")
        }
        assert {place.split(".")[2] for place in of_layers} == {"mlp", "attn"}
        for place, scores in of_layers.items():
            torch.testing.assert_close(
                scores.float(), seen.expected(place), rtol=1e-4, atol=1e-6, msg=place
            )
        torch.testing.assert_close(
            found.scores["hidden"].float(), seen.of_hidden(), rtol=1e-4, atol=1e-6
        )


MODELS = ("mixtral", "gpt_oss", "llama4", "gemma4", "hybrid", "laguna", "beam", "further tokens")


@pytest.mark.parametrize("model", MODELS)
def test_padding_and_other_passes_change_no_score(model: str) -> None:
    """Biases of experts, weights on their input, norms of their own, experts in a latent width, MTP layers."""
    one, together = (_measured(model, rows) for rows in (1, len(ROWS)))
    assert list(one.scores) == list(together.scores)
    for place, scores in one.scores.items():
        torch.testing.assert_close(scores, together.scores[place], rtol=1e-4, atol=1e-6, msg=place)


@pytest.mark.parametrize("model", ["mixtral", "gpt_oss", "hybrid", "beam", "further tokens"])
def test_padding_and_other_passes_change_no_score_of_a_head(model: str) -> None:
    """Attention with sinks and gates, Mamba and linear attention, MTP layers."""
    one, together = (_measured(model, rows, OF_HEADS) for rows in (1, len(ROWS)))
    assert one.scores
    assert list(one.scores) == list(together.scores)
    for place, scores in one.scores.items():
        torch.testing.assert_close(scores, together.scores[place], rtol=1e-4, atol=1e-6, msg=place)


def _measured(model: str, together: int, fields: Sequence[str] = FIELDS) -> ChannelScores:
    engine: Engine = make_engine(Case(model))
    return measure(engine, passes(engine, together), fields)


def test_only_the_channels_of_the_asked_sizes_are_measured() -> None:
    engine = make_engine(Case("mixtral"))
    found = measure(engine, passes(engine, 1), ["experts.ffn"])
    assert set(found.scores) == {f"layers.{n}.mlp.experts.{e}" for n in range(4) for e in range(4)}
    engine = make_engine(Case("mixtral"))
    assert set(measure(engine, passes(engine, 1), ["hidden"]).scores) == {"hidden"}
