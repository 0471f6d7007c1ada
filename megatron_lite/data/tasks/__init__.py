"""Data of the tasks that Megatron-LM finetunes a BERT on (tasks/main.py): MNLI, QQP and RACE, in Megatron's samples.

examples   the content of a file: texts, and the right answer
glue       MNLI and QQP
race       RACE
samples    texts as tokens of one or several sequences
dataset    the order of samples: epochs
"""
