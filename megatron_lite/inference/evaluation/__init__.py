"""How good a model is: Megatron's zero-shot tasks, and any of lm-eval's."""
