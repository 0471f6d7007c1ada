"""TRL's RewardTrainer on given pairs of token lists. Run by the Python that TRL_PYTHON names.

python -m tests.trl_rewards MODEL PAIRS.json OUTPUT STEPS LR COEFFICIENT      all pairs are one batch
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from tests.trl_oracle import Recorder, numbers


def main(
    path: str, pairs: Path, output: Path, steps: int, rate: float, coefficient: float | None
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype="float32")
    rows = json.loads(pairs.read_text())
    settings = RewardConfig(
        output_dir=str(output), per_device_train_batch_size=len(rows["chosen_ids"]), max_steps=steps, learning_rate=rate,
        center_rewards_coefficient=coefficient, lr_scheduler_type="constant", weight_decay=0.0, adam_epsilon=1e-5, max_grad_norm=1e9,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = numbers(99, 98)
    tokenizer.pad_token = None  # then TRL takes the end of text
    recorder = Recorder()
    RewardTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
    ).train()
    (output / "logs.json").write_text(json.dumps(recorder.logs))
    model.save_pretrained(output / "model")


if __name__ == "__main__":
    place, given, out, *others = sys.argv[1:]
    count, lr, center = others
    main(place, Path(given), Path(out), int(count), float(lr), float(center) or None)
