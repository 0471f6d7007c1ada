"""Finetuning data: records of many forms → tokens, with a mark on learned tokens → samples of whole examples."""
