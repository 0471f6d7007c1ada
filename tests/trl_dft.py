"""TRL's SFTTrainer with DFT's loss. Run by the Python that TRL_PYTHON names.

python -m tests.trl_dft MODEL PROMPTS.jsonl OUTPUT STEPS LR      one batch of all examples in each step
"""

import json
import sys
from pathlib import Path

from trl import SFTConfig, SFTTrainer

from tests.trl_oracle import OF_FINETUNING, learn


def main(model: str, data: str, output: str, steps: str, rate: str) -> None:
    records = [json.loads(line) for line in Path(data).read_text().splitlines()]
    columns = {
        "prompt": [record["prompt"] for record in records],
        # TRL joins the texts before it splits them into numbers.
        "completion": [f" {record['completion']}" for record in records],
    }
    settings = SFTConfig(
        output_dir=output,
        loss_type="dft",
        per_device_train_batch_size=len(records),
        max_steps=int(steps),
        learning_rate=float(rate),
        **OF_FINETUNING,
    )
    learn(SFTTrainer, model, columns, settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
