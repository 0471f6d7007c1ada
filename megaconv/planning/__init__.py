"""The cost of a training run without starting it: memory of each rank, bytes between ranks, the pipeline's bubble.

Plain arithmetic on a model's description and a run's sizes. Nothing here imports torch or numpy.
"""
