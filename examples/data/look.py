"""Shows which tokens the first samples of a training run have.

python examples/data/look.py --data-path 0.3 news_text_document 0.7 code_text_document --seq-length 32 --train-samples 1000 --eod 100
"""

import argparse

from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.tokenizer import NullTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the first samples of a training run.")
    parser.add_argument("--data-path", nargs="+", required=True)
    parser.add_argument("--split", default="969,30,1")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--train-samples", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--eod", type=int, required=True, help="token that ends a document")
    parser.add_argument("--first", type=int, default=3, help="how many samples to show")
    given = parser.parse_args()
    options = DataOptions(
        given.seq_length,
        given.seed,
        given.data_path,
        given.split,
        reset_position_ids=True,
        eod_mask_loss=True,
    )
    datasets = build_datasets(options, NullTokenizer(given.eod), (given.train_samples, 10, 10))
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        print(f"{name}: {len(dataset) if dataset else 0:,} samples")
    train = datasets[0]
    for number in range(given.first if train else 0):
        sample = train[number]
        ends = int((sample.tokens == given.eod).sum())
        print(
            f"sample {number}: {' '.join(map(str, sample.tokens))} -> {sample.labels[-1]}; {ends} ends of documents"
        )


if __name__ == "__main__":
    main()
