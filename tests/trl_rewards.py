"""TRL's RewardTrainer on given pairs of token lists. Run by the Python that TRL_PYTHON names.

python -m tests.trl_rewards train MODEL PAIRS.json OUTPUT STEPS LR COEFFICIENT [ADAPTER]      all pairs are one batch
python -m tests.trl_rewards scores MODEL ADAPTER ROWS.json      prints the scores of rows of tokens

ADAPTER: a directory of peft, whose configuration becomes the trainer's peft_config, and whose tensors it starts from.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from tests.trl_oracle import Recorder, numbers


def main(
    path: str,
    pairs: Path,
    output: Path,
    steps: int,
    rate: float,
    coefficient: float | None,
    adapter: str | None,
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype="float32")
    rows = json.loads(pairs.read_text())
    count = len(rows["chosen_ids"])
    settings = RewardConfig(
        output_dir=str(output), per_device_train_batch_size=count, per_device_eval_batch_size=count, max_steps=steps,
        learning_rate=rate, center_rewards_coefficient=coefficient, lr_scheduler_type="constant", weight_decay=0.0,
        adam_epsilon=1e-5, max_grad_norm=1e9, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = numbers(99, 98)
    tokenizer.pad_token = None  # then TRL takes the end of text
    recorder = Recorder()
    trainer = RewardTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict(rows),
        eval_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
        peft_config=None if adapter is None else trained_again(adapter),
    )
    if adapter is not None:
        loaded: Any = set_peft_model_state_dict(trainer.model, load_peft_weights(adapter))
        assert not loaded.unexpected_keys
    trainer.train()
    evaluated = trainer.evaluate()
    (output / "logs.json").write_text(json.dumps(recorder.logs))
    (output / "evaluated.json").write_text(json.dumps(evaluated))
    trainer.model.save_pretrained(output / "model")


def trained_again(adapter: str) -> LoraConfig:
    """The configuration of an adapter, for training."""
    config = LoraConfig.from_pretrained(adapter)
    config.inference_mode = False
    return config


def scores(path: str, adapter: str, rows: list[list[int]]) -> list[float]:
    """The scores that peft's class gives to rows of tokens."""
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype="float32")
    model = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits.item() for row in rows]


if __name__ == "__main__":
    word, place, *given = sys.argv[1:]
    if word == "scores":
        print(json.dumps(scores(place, given[0], json.loads(Path(given[1]).read_text()))))
    else:
        pairs_of, out, count, lr, center, *others = given
        main(
            place,
            Path(pairs_of),
            Path(out),
            int(count),
            float(lr),
            float(center) or None,
            next(iter(others), None),
        )
