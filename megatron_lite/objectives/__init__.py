"""Training objectives, one file each: the data that an objective reads, its microbatches, its loss and its log lines."""
