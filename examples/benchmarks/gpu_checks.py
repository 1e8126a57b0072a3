"""What a first run on a GPU must show, one check a process; `first_hour.py` runs them all.

    python examples/benchmarks/gpu_checks.py devices --device cuda
    python examples/benchmarks/gpu_checks.py token --device second     # no GPU: the device that tests simulate

A check prints ``RESULT`` and its figure, or ends with an error. Waits for the GPU are counted by
`torch.cuda.set_sync_debug_mode`. Without a GPU they are counted on the device of tests/helpers/second_device.py, by the
operations that wait on CUDA: that shows what the library asks for, not what CUDA's own kernels do.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium  # noqa: E402
import torch  # noqa: E402
from gpu import CPU, CUDA, make_env, make_policy  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from algos import DQN, PPO, SAC, LMPolicy, PPOConfig  # noqa: E402
from algos.policies.critic import Critic  # noqa: E402
from textenv.acceleration import FAST  # noqa: E402
from textenv.rollout import to_device  # noqa: E402

SIMULATED = "second"
"""Name of the device of tests/helpers/second_device.py."""
CUDA_WAITS = "called a synchronizing CUDA operation"
"""What torch's warning says of an operation that waits for the GPU."""


# Where every tensor is


ON_THE_CPU = {
    "reward_normalizer": "statistics of rewards",
    "collector": "observations and action masks of the environment",
    "buffer": "the replay buffer, of which only samples are moved",
    "policy.memory": "random streams",
}
"""Parts of an agent whose tensors belong on the CPU (docs/runs.md, "Devices")."""


def named_tensors(holder, name="", seen=None):
    """Yield the name and tensor of everything that an object holds, its environment left out."""
    seen = set() if seen is None else seen
    if id(holder) in seen or name.endswith((".env", ".tokenizer", ".lm.model.config")):
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield name.strip("."), holder
        return

    # What the object holds: entries, or attributes
    if isinstance(holder, Mapping):
        parts = [(_key(key), value) for key, value in holder.items()]
    elif isinstance(holder, (list, tuple)):
        parts = list(enumerate(holder))
    elif type(holder).__module__.split(".")[0] in ("algos", "textenv", "torch", "transformers", "peft", "tensordict"):
        parts = list(getattr(holder, "__dict__", {}).items())
    else:
        return
    for key, value in parts:
        # Modules hold their tensors in these dictionaries, whose names say nothing
        inner = name if key in ("_parameters", "_buffers", "_modules") else f"{name}.{key}"
        yield from named_tensors(value, inner, seen)


def _key(key):
    """Name of a dictionary's key; Adam's state has parameters as keys."""
    if isinstance(key, torch.Tensor):
        return f"weight of shape {tuple(key.shape)}"
    return key


def misplaced(tensors, device):
    """Sentences on tensors, by name, that are on another type of device and not `ON_THE_CPU`."""
    wrong = []
    for name, tensor in tensors:
        place = tensor.device.type
        by_design = place == "cpu" and any(name == part or name.startswith(f"{part}.") for part in ON_THE_CPU)
        if place != torch.device(device).type and not by_design:
            wrong.append(f"{name} is on {tensor.device}")
    return wrong


def devices(device):
    """Train each kind of agent for an iteration, and look where its tensors and those of its rollout are."""
    counts = Counter()
    wrong = []
    for kind, agent in agents(device).items():
        rollouts = []
        update = agent.update

        def recorded(rollout, update=update, rollouts=rollouts):
            metrics = update(rollout)
            rollouts.append(rollout)
            return metrics

        agent.update = recorded
        agent.learn(64)
        del agent.update
        tensors = [*named_tensors(agent)]
        for rollout in rollouts[-1:]:
            tensors += [(f"rollout.{name}", column) for name, column in rollout.items() if torch.is_tensor(column)]
        counts[kind] = len(tensors)
        wrong += [f"{kind}: {sentence}" for sentence in misplaced(tensors, device)]
    if wrong:
        raise AssertionError("; ".join(wrong[:20]))
    return {"figure": f"{sum(counts.values())} tensors of {len(counts)} agents on {device}", "tensors": counts}


def agents(device):
    """Text with a value head, text with a critic, and three control algorithms: small ones, made on the CPU."""
    return {
        "text, value head": text_agent(device),
        "text, critic": text_agent(device, with_critic=True),
        "PPO": control_agent(device),
        "PPO, several choices": PPO(gymnasium.make_vec("textenv-checks/Choices-v0", num_envs=4), device=device,
                                    num_steps=8, minibatch_size=16),
        "DQN": DQN(gymnasium.make_vec("CartPole-v1", num_envs=4), device=device, learning_starts=8, batch_size=4),
        "SAC": SAC(gymnasium.make_vec("Pendulum-v1", num_envs=4), device=device, learning_starts=8, batch_size=4),
    }  # fmt: skip


class Choices(gymnasium.Env):
    """Two choices, one of which counts from 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.MultiDiscrete([2, 3], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), float(action[0]), not self.left, False, {}


gymnasium.register("textenv-checks/Choices-v0", Choices)


def text_agent(device, *, with_critic=False, dtype=torch.float32, **options):
    """PPO with a KL penalty on a decoder of two layers; 2 minibatches an update."""
    policy = make_policy(CPU, "cpu", dtype=dtype, **options)
    if with_critic:
        policy = LMPolicy(policy.lm.model, policy.tokenizer, critic=Critic.from_language_model(policy.lm))
    if device == SIMULATED:  # as in tests/helpers/device_runs.py
        policy.lm.model.set_attn_implementation("eager")
    env = make_env(policy, CPU)
    config = PPOConfig(
        num_steps=None, num_episodes=8, minibatch_size=4, num_epochs=1, gamma=1.0, bootstrap_truncated=False
    )
    return PPO(env, policy, config, kl_coef=0.1, device=_device(device))


def control_agent(device):
    """PPO on CartPole; 4 minibatches an update."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=8)
    return PPO(env, device=_device(device), num_steps=16, minibatch_size=32, num_epochs=1)


def _device(name):
    return "auto" if name == SIMULATED else name


# Waits for the device, and copies between it and the CPU


class Waits:
    """Counts of operations that wait for the device, and of bytes copied, by the library's function that asks for them."""

    def __init__(self):
        self.counts = Counter()
        self.bytes = Counter()

    def add(self, size=0):
        """Count one operation, of the innermost function of the library that is running now."""
        site = site_of(sys._getframe(1))
        self.counts[site] += 1
        self.bytes[site] += size

    def on_warning(self, message, category, filename, lineno, file=None, line=None):
        """Count a warning of `torch.cuda.set_sync_debug_mode`; takes the place of `warnings.showwarning`."""
        if CUDA_WAITS in str(message):
            self.add()


def site_of(frame):
    """Name of the innermost function of the library in a stack, such as ``algos/optimizer.py:_finite``."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("algos", "textenv"):
            function = frame.f_code.co_qualname.split(".<locals>")[0]
            return f"{path.relative_to(ROOT).as_posix()}:{function}"
        frame = frame.f_back
    return "outside the library"


@contextmanager
def counted_on_cuda(waits):
    """Context in which torch's own warnings of waits are counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # else Python shows each line's warning once
        warnings.showwarning = waits.on_warning
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
"""Operations whose result, or its size, the CPU needs at once."""


class CountedOperations(TorchDispatchMode):
    """Context in which operations that wait for a device are counted, with the bytes that they copy.

    Args:
        waits: where they are counted.
        device_type: such as ``"cuda"``.
        only_copies: count only copies between the device and the CPU.
    """

    def __init__(self, waits, device_type, *, only_copies=False):
        super().__init__()
        self.waits = waits
        self.device_type = device_type
        self.only_copies = only_copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        size = self._size_if_waits(func._schema.name.removeprefix("aten::"), args, kwargs)
        if size is not None:
            self.waits.add(size)
        return func(*args, **kwargs)

    def _size_if_waits(self, name, args, kwargs):
        """Return the bytes that an operation copies; None if it does not wait."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {x.device.type for x in tensors}
        source = tensors[-1] if tensors else None

        # Copies between devices; a tensor of one number is a constant that kernels get as an argument
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None:
            target = torch.device(target).type
            if target != source.device.type and self.device_type in (target, source.device.type):
                return None if kwargs.get("non_blocking") else source.nbytes
        if name == "copy_" and len(places) == 2 and self.device_type in places:
            return source.nbytes
        if self.device_type not in places:
            return None
        if name in ("index", "index_put_", "_index_put_impl_"):
            for index in args[1]:
                if index is not None and index.device.type != self.device_type:
                    return index.nbytes
                if index is not None and index.dtype == torch.bool and not self.only_copies:
                    return 0
        if name in READS and not (self.only_copies and name != "_local_scalar_dense"):
            return source.element_size()
        return None


@dataclass(frozen=True)
class Named:
    """A wait that must be, or that is known.

    Args:
        reason: why.
        each: at most so many times in an iteration of the loop.
        once: and so many times more for the whole call, before or after the loop.
    """

    reason: str
    each: int = 0
    once: int = 0


def judged(waits, named, iterations):
    """Sentences on waits that are not named, or more than named."""
    wrong = []
    for site, count in sorted(waits.counts.items()):
        allowed = named.get(site)
        if allowed is None:
            wrong.append(f"{site} waits {count} times in {iterations} iterations and is not named")
        elif count > allowed.each * iterations + allowed.once:
            wrong.append(
                f"{site} waits {count} times in {iterations} iterations, expected at most {allowed.each} in each "
                f"and {allowed.once} more"
            )
    return wrong
