"""Adapters merged into the weights that they were trained beside, or translated.

peft_files      a directory as peft saves it: its configuration, and its tensors by the module that each belongs to
targets         which tensors of the model a module's adapter changes
low_rank        the arithmetic: what an adapter adds, and how peft adds it, bit for bit
merging         a source whose tensors have adapters merged into them
translation     an adapter by itself as a source; its matrices in any naming scheme
sharing         matrices that are one in Megatron-Bridge, found again where a file holds them several times
derived         parts and joins of matrices
"""
