"""Names of the files and folders in the folder of a run."""

# Metrics and tables
METRICS = "metrics.jsonl"
"""Metrics of each iteration."""
SAMPLES = "samples.jsonl"
"""Rows of tables of samples."""
TOKENS = "tokens.jsonl"
"""Rows of tables of tokens."""

# The agent
CONFIG = "config.json"
"""Description of a saved agent: environment, algorithm, policy, hyper-parameters, and what made it."""
POLICY = "policy"
"""Folder with the weights of a saved agent."""
OBJECTS = "objects.safetensors"
"""States of rewards and of other objects that the environment calls, beside a saved agent."""
BEST = "best"
"""Folder of the agent with the best evaluation while training."""

# Checkpoints
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints, each a folder ``step-STEPS``."""
AGENT = "agent"
"""Folder of the agent inside a checkpoint."""
STATE = "state.json"
"""State of the run inside a checkpoint; its arrays and tensors are in `TENSORS`."""
TENSORS = "state.safetensors"
"""Arrays and tensors of the state."""
MANIFEST = "manifest.json"
"""Format, steps and checksums of a checkpoint."""

# The description of the run
RUN = "run.yaml"
"""Options of ``algos train`` that repeat the run, and resume it."""
MARK = ".made-here"
"""Keyed hash of `RUN`, which shows that this user's own command wrote it."""
COMPARISON = "comparison.json"
"""Of a run of `compare`: the settings that it was trained with and, once it has finished, the result."""
EPISODES = "words.json"
"""Of a run of `compare` in words: an episode before the training and one after it, step by step."""

# The state of the run
UNFINISHED = ".failed"
"""Of a run that did not end by itself: how it ended."""
LOCK = ".lock"
"""File that the process of a run locks."""
HOLDER = ".holder.json"
"""Which process holds the lock."""

# What else a run may leave
UNSCORED = "unscored.jsonl"
"""Answers that a reward could not score."""
VIOLATION_BATCH = "violation.safetensors"
"""Columns of the batch in which an invariant was violated."""
VIOLATION_REPORT = "violation.json"
"""Description of the violation."""
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's logs."""
WANDB = "wandb"
"""Folder of Weights & Biases."""
WANDB_ID = "wandb.id"
"""Identifier of the run at Weights & Biases, by which a resumed run continues it."""

RESULTS = (METRICS, CHECKPOINTS, CONFIG, POLICY, BEST)
"""Results of a run, which a new run must not replace."""
BESIDE_RESULTS = (
    UNFINISHED,
    RUN,
    OBJECTS,
    COMPARISON,
    EPISODES,
    MARK,
    SAMPLES,
    TOKENS,
    TENSORBOARD,
    WANDB,
    WANDB_ID,
    UNSCORED,
    VIOLATION_BATCH,
    VIOLATION_REPORT,
)
"""Files that a run writes beside its results."""
