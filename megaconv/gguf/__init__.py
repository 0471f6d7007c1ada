"""GGUF: the description of a model in its metadata, the names of its tensors, and the tokenizer."""
