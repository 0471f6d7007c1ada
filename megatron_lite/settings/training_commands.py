"""The commands that train."""

DESCRIPTIONS = {
    "pretrain": "Train a model from the start, or continue a run at any parallel layout.",
    "finetune": "Train on from the weights of any checkpoint that megaconv reads.",
}
