"""Images in finetuning data: their files, the tokens that stand for them, and their positions."""
