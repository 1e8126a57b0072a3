"""The suite. Importing it sets what every test relies on, in processes that a test starts too, and imports nothing."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread is fastest for models of this size, and results do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
