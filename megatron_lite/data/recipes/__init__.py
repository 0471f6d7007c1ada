"""Recipes that prepare a corpus of text, one file each: the commands of `megatron_lite data`."""
