"""Adapters: merged into the weights that they were trained for, or translated into another format.

peft_files      a directory as peft saves it: its configuration, and its tensors by the module that each belongs to
mlx_files       a directory as mlx-lm saves it
opening         a directory of either
named_tensors   the tensors of a model by the names that an adapter uses
targets         the tensors of the model that a module's adapter changes
low_rank        the arithmetic: what an adapter adds, and how peft adds it, bit for bit
merging         a source whose tensors have adapters merged into them
provenance      whether an adapter was trained on this base, and whether it is merged into it already
translation     an adapter alone as a source; its matrices in any naming scheme
sharing         detection of matrices that a file repeats and Megatron-Bridge has once
derived         parts and joins of matrices
"""
