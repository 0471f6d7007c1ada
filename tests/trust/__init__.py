"""Attacks on megaconv and its trainer by the ten thousand: kills, failing system calls, damaged and hostile files, fuzzing.

    python -m tests.trust --kills 1000 --faults 10000 --seed 7 --jobs 2      `make trust` runs it at full length
    python -m tests.trust --seed 7 --repeat kills:123                        one case once more, as a failure prints it

What has to hold is in docs/reliability.md, and in words that decide in judging.py.
"""
