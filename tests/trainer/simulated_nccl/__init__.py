"""Training on simulated NCCL: ranks are threads, communicators behave as NCCL's, and data is real."""
