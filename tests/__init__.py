"""The suite. Importing it sets what every test relies on, in processes that a test starts too."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# One thread is fastest for models of this size, and results do not depend on the number of cores.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
