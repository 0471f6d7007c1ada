"""Evaluation: Megatron's zero-shot tasks, and the tasks of lm-eval."""
