"""TRL's SFTTrainer with DFT's loss. Run by the Python that TRL_PYTHON names.

python -m tests.trl_dft MODEL PROMPTS.jsonl OUTPUT STEPS LR      one batch of all examples in each step
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from tests.trl_oracle import OF_FINETUNING, Recorder, numbers


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
    recorder = Recorder()
    trained = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    SFTTrainer(
        model=trained,
        args=settings,
        train_dataset=Dataset.from_dict(columns),
        processing_class=numbers(99, 98),
        callbacks=[recorder],
    ).train()
    (Path(output) / "logs.json").write_text(json.dumps(recorder.logs))
    trained.save_pretrained(Path(output) / "model")


if __name__ == "__main__":
    main(*sys.argv[1:])
