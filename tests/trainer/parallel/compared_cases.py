"""What runs on pairs and on rated answers have in common: the layouts, the engine, and the update in plain torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.criterion import Criterion
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions, Recompute

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAMPLES, LENGTH, STEPS = 4, 16, 10
LR, DECAY, BETAS = 5e-3, 0.1, (0.9, 0.95)
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small run."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    """1: the optimizer's state is sharded; 3: gradients and parameters too."""
    recompute: Recompute = Recompute()  # noqa: RUF009  # frozen
    lora: LoRA | None = None
    model: str = "llama-all-linear"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def base(self) -> Path:
        return FIXTURES / f"peft-{self.model}" / "base"

    @property
    def loss(self) -> str:
        """The name of the loss, if there are several."""
        return ""

    def __str__(self) -> str:
        sizes = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "dp", "cp", "zero")
            if getattr(self, name) > (name != "zero")
        ]
        words = [self.model, self.loss, *sizes, self.recompute.granularity or ""]
        words += ["sp"] * self.sequence_parallel + ["lora"] * (self.lora is not None)
        return " ".join(filter(None, words))


AnyCase = TypeVar("AnyCase", bound=Case)


def alone(case: AnyCase) -> AnyCase:
    """The same run in one process."""
    plain = Case()
    return replace(
        case,
        tp=1,
        pp=1,
        dp=1,
        cp=1,
        sequence_parallel=plain.sequence_parallel,
        zero=plain.zero,
        recompute=plain.recompute,
    )


def make_engine(case: Case, criterion: Criterion, device: torch.device = CPU) -> Engine:
    source = open_checkpoint(case.base)
    stages = split_layers(source.config.layer_count, case.pp, 1, LayerSplit())
    layout = Layout(case.tp, case.pp, 1, stage_layers=stages)
    grid = make_grid(layout, case.dp, device, cp=case.cp, experts=source.config.experts.count > 0)
    options = ModelOptions(
        "float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1 if case.tp == 1 else 2,
        lora=case.lora,
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=BETAS, clip_grad=0, distributed=case.zero > 0, shards_gradients=case.zero > 1, shards_parameters=case.zero > 2,
        bucket_elements=500,
    )  # fmt: skip
    engine = Engine(source.config, grid, options, optimizer, criterion)
    load_weights(engine, source.tensors)
    return engine


def plain_model(case: Case) -> tuple[Any, torch.optim.Optimizer]:
    """transformers' model, and AdamW as the trainer has it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=LR, betas=BETAS)


def plain_update(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, float]:
    """Update the model. Returns the loss and the norm of the gradient."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": norm.item()}


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
