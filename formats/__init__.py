"""File formats: how bytes lie on disk, read as lazy tensors and written as planned files. Knows no naming, imports nothing of ours."""
