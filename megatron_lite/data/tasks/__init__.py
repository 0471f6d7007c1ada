"""Data of the tasks that Megatron-LM finetunes a BERT on (tasks/main.py): MNLI, QQP and RACE, in its samples.

examples   what a file holds: texts, and the right answer
glue       MNLI and QQP
race       RACE
samples    texts as tokens of one or several sequences
dataset    the order of samples: epochs
"""
