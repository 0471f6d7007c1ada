"""Blocks of consecutive sentences with their titles: samples of the inverse cloze task (ICT), which trains retrievers."""
