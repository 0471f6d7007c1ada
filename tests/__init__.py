"""All tests. Each process of them computes in one thread, as several run at once: threads that wait for a processor spin,
and tests of many small models then take three times as long."""

import os

# Before anything imports torch, which reads it once. Processes that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
