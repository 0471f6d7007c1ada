"""TRL's GRPOTrainer on given completions and rewards, or on a toy task. Run by the Python that TRL_PYTHON names.

python -m tests.trl_oracle CASES.json OUTPUT      the losses and weights of each case, without sampling
python -m tests.trl_oracle toy MODEL STEPS        the mean reward of each step, on standard output
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OWN = (
    "loss_type",
    "num_iterations",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "mask_truncated_completions",
    "temperature",
    "scale_rewards",
    "use_bias_correction_kl",
)
"""Settings of a case that have TRL's names."""

COMMON = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
"""Settings of all of TRL's trainers."""
OF_FINETUNING = {
    **COMMON,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
}
"""Settings of runs on given examples."""


def numbers(vocab: int, eos: int) -> PreTrainedTokenizerFast:
    """A tokenizer of numbers with spaces between them. 0 is padding."""
    words = {"[PAD]": 0, **{str(number): number for number in range(1, vocab)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=str(eos), pad_token="[PAD]")


class Given(GRPOTrainer):
    """A trainer whose completions are given."""

    given: Any

    def _generate_single_turn(self, prompt_ids: Any, *others: Any, **named: Any) -> Any:
        return next(self.given), None


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs or "reward" in logs:
            self.logs.append(dict(logs))


def learn(kind: Any, model: str, columns: dict[str, Any], settings: Any, **further: Any) -> None:
    """Train on given examples, and write the losses and the weights into the settings' directory. kind: of TRL's trainers."""
    recorder = Recorder()
    trained = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    kind(
        model=trained,
        args=settings,
        train_dataset=Dataset.from_dict(columns),
        processing_class=numbers(99, 98),
        callbacks=[recorder],
        **further,
    ).train()
    output = Path(settings.output_dir)
    (output / "logs.json").write_text(json.dumps(recorder.logs))
    trained.save_pretrained(output / "model")


def config(output: Path, **settings: Any) -> GRPOConfig:
    return GRPOConfig(**COMMON | {"output_dir": str(output), "shuffle_dataset": False} | settings)


def run(case: dict[str, Any], output: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype="float32")
    groups, batches = case["num_generations"], case["batches"]
    rows = len(batches[0]["completions"])
    rewards = iter([batch["rewards"] for batch in batches])
    prompts = [prompt for batch in batches for prompt in batch["prompts"]]
    settings = config(
        output,
        per_device_train_batch_size=rows,
        num_generations=groups,
        max_completion_length=case["max_completion_length"],
        max_steps=len(batches) * case["num_iterations"],
        learning_rate=case["lr"],
        weight_decay=0.0,
        max_grad_norm=0.0,
        adam_epsilon=case["eps"],
        adam_beta1=case["betas"][0],
        adam_beta2=case["betas"][1],
        **{name: case[name] for name in OWN},
    )
    recorder = Recorder()
    trainer = Given(
        model=model,
        reward_funcs=lambda completions, **_: next(rewards),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=numbers(case["vocab"], case["eos"]),
        callbacks=[recorder],
    )
    trainer.given = iter([batch["completions"] for batch in batches])
    trainer.train()
    (output / "logs.json").write_text(json.dumps(recorder.logs))
    model.save_pretrained(output / "model")


def toy(path: str, steps: int) -> None:
    def sevens(completions: list[str], **_: Any) -> list[float]:
        return [text.split().count("7") / max(len(text.split()), 1) for text in completions]

    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    settings = config(
        Path("toy"), per_device_train_batch_size=32, num_generations=8, max_completion_length=8, max_steps=steps,
        learning_rate=1e-2, weight_decay=0.0,
    )  # fmt: skip
    recorder = Recorder()
    prompts = [f"{n} 2" for n in range(7, 15)]
    GRPOTrainer(
        model=model,
        reward_funcs=sevens,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=numbers(99, 98),
        callbacks=[recorder],
    ).train()
    print(json.dumps([log["reward"] for log in recorder.logs if "reward" in log]))


if __name__ == "__main__":
    if sys.argv[1] == "toy":
        toy(sys.argv[2], int(sys.argv[3]))
    else:
        for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
            place = Path(sys.argv[2]) / name
            place.mkdir(parents=True)
            run(case, place)
