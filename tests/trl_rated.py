"""TRL's KTOTrainer on rated answers. Run by the Python that TRL_PYTHON names.

python -m tests.trl_rated MODEL RATED.jsonl OUTPUT STEPS LR BETA GOOD BAD      one batch of all answers in each step
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer

from tests.trl_oracle import OF_FINETUNING, learn


def main(model: str, data: str, output: str, steps: str, *values: str) -> None:
    rate, beta, good, bad = map(float, values)
    records = [json.loads(line) for line in Path(data).read_text().splitlines()]
    names = ("prompt", "completion", "label")
    columns = {name: [record[name] for record in records] for name in names}
    # TRL joins the texts before it splits them into numbers.
    columns["completion"] = [f" {text}" for text in columns["completion"]]
    settings = KTOConfig(
        output_dir=output,
        per_device_train_batch_size=len(records),
        max_steps=int(steps),
        learning_rate=rate,
        beta=beta,
        desirable_weight=good,
        undesirable_weight=bad,
        **OF_FINETUNING,
    )
    reference = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    learn(KTOTrainer, model, columns, settings, ref_model=reference)


if __name__ == "__main__":
    main(*sys.argv[1:])
