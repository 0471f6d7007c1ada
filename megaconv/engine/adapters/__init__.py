"""Adapters merged into the weights that they were trained beside.

peft_files      a directory as peft saves it: its configuration, and its tensors by the module that each belongs to
targets         which tensors of the model a module's adapter changes
low_rank        the arithmetic: what an adapter adds, and how peft adds it, bit for bit
merging         a source whose tensors have adapters merged into them
"""
