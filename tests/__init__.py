"""Tests. One thread for each process: several run at once, and threads that wait for each other's cores cost most."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
