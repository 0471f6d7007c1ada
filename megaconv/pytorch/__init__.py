"""The training state of torch's optimizers: in distributed checkpoints (DCP) and in DeepSpeed's universal ones."""
