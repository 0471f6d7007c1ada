"""TRL's KTOTrainer on rated answers. Run by the Python that TRL_PYTHON names.

python -m tests.trl_rated MODEL RATED.jsonl OUTPUT STEPS LR BETA GOOD BAD      one batch of all answers in each step
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer

from tests.trl_oracle import OF_FINETUNING, Recorder, numbers


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
    recorder = Recorder()
    trained = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    KTOTrainer(
        model=trained,
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=settings,
        train_dataset=Dataset.from_dict(columns),
        processing_class=numbers(99, 98),
        callbacks=[recorder],
    ).train()
    (Path(output) / "logs.json").write_text(json.dumps(recorder.logs))
    trained.save_pretrained(Path(output) / "model")


if __name__ == "__main__":
    main(*sys.argv[1:])
