"""The options that divide layers over pipeline stages."""

from collections.abc import Mapping

from megaconv.options.option import LAYOUT, Option, Range
from megaconv.options.values import numbers

SPLIT: Mapping[str, Option] = {
    "layers": Option(
        ("--layer-split",),
        heading=LAYOUT,
        metavar="N,N,...",
        words=str | None,
        read=numbers,
        help="Layers of each pipeline stage: 3,5,5,3.",
    ),
    "first": Option(
        ("--decoder-first-pipeline-num-layers",),
        heading=LAYOUT,
        range=Range(0),
        help="Layers of the first stage.",
    ),
    "last": Option(
        ("--decoder-last-pipeline-num-layers",),
        heading=LAYOUT,
        range=Range(0),
        help="Layers of the last stage.",
    ),
    "account_for_embedding": Option(
        ("--account-for-embedding-in-pipeline-split",),
        heading=LAYOUT,
        help="Count the embedding as a layer of the first stage.",
    ),
    "account_for_loss": Option(
        ("--account-for-loss-in-pipeline-split",),
        heading=LAYOUT,
        help="Count the head as a layer of the last stage.",
    ),
    "pattern": Option(
        ("--pipeline-model-parallel-layout",),
        heading=LAYOUT,
        metavar="LAYOUT",
        help="Megatron's layout string: 'Et*3|(tt|)*2,tL'.",
    ),
    "split_rank": Option(
        ("--pipeline-model-parallel-split-rank",),
        heading=LAYOUT,
        python="split_rank",
        range=Range(1),
        help="T5 only: the first of the --pp stages that belongs to the decoder; the stages before it are the encoder's.",
    ),
}
"""The options of LayerSplit by field. The model's layouts know nothing about options."""
