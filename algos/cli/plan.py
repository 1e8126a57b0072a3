"""``algos plan``: the memory that a training takes, before it is started."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from algos.cli.tables import print_table
from algos.cli.train import AnyConfig, Train
from textenv.startup import load_torch

GIB = 2**30
"""Bytes of a GiB."""

MARGIN = 1.1
"""Memory to have on a CPU for each byte of tensors: allocators keep freed pieces."""

MARGIN_ON_GPU = 1.15
"""The same on a GPU, whose attention keeps more for its backward pass than a CPU's (docs/results/memory.md)."""

WORKSPACES = 128 * 2**20
"""Bytes that cuBLAS takes on a GPU."""

WORTHWHILE = 0.99
"""Part of the peak below which an option has to bring it to be recommended."""

DEFAULT_TOKENS = 128
"""Length of prompts and of completions without options for them, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Plan(Train[AnyConfig]):
    """Estimate the peak memory of a training of text, and what makes it fit; takes all options of train.

    No weights are read. Texts are as long as they may be: without --max-prompt-tokens and --max-new-tokens, 128 each.
    """

    gpus: int = 1
    """Processes with a GPU each, which share the rows (torchrun)."""
    gpu_memory: float | None = None
    """Memory of a GPU in GiB; None: what is free on --device."""

    def run(self) -> dict[str, object]:
        """Print the parts of memory by phase, and the options to add until it fits; return the outcome."""
        if not self.is_text_run() or self.algo == "trpo":
            raise ValueError(f"plan is for text and every algorithm but trpo, not for {self.algo} on {self.env}")
        if self.gpus <= 0 or (self.gpu_memory is not None and self.gpu_memory <= 0):
            raise ValueError(f"--gpus is {self.gpus} and --gpu-memory {self.gpu_memory}, expected numbers above 0")
        run = self._with_absolute_paths()
        free_bytes = self._free_bytes()

        # As the options are
        phases = self._peaks(run)
        peak, phase = max((parts.total(), name) for name, parts in phases.items())
        result = {"peak GiB": peak / GIB, "phase": phase, "fits": self._memory_for(peak) <= free_bytes}

        # Options that lower the peak, one after the other until it fits
        helpful_options = []
        helpful_changes: dict[str, Any] = {}
        for option, change in self._savings().items():
            if self._memory_for(peak) <= free_bytes:
                break
            changed_phases = self._peaks(replace(run, **helpful_changes, **change))
            lower_peak = max(parts.total() for parts in changed_phases.values())
            if lower_peak < WORTHWHILE * peak:
                saved = peak - lower_peak
                helpful_options.append({"add": option, "saves GiB": saved / GIB, "then GiB": lower_peak / GIB})
                helpful_changes |= change
                peak = lower_peak
        if not result["fits"]:
            result["fits with these options"] = self._memory_for(peak) <= free_bytes

        if self.json:
            return result | {"phases": phases, "options": helpful_options}
        _print_phases(phases)
        if helpful_options:
            print_table([row.values() for row in helpful_options], [*helpful_options[0]])
        return result

    @property
    def _on_gpu(self) -> bool:
        return self.gpu_memory is not None or self.device not in (None, "cpu")

    def _memory_for(self, peak: float) -> float:
        """Return the memory to have for tensors of so many bytes."""
        if self._on_gpu:
            return peak * MARGIN_ON_GPU + WORKSPACES
        return peak * MARGIN

    def _free_bytes(self) -> float:
        """Return the memory that the training may use; infinity if it is not known."""
        load_torch()
        from textenv.device import free_memory

        if self.gpu_memory is not None:
            return self.gpu_memory * GIB
        return free_memory(self.device) or float("inf")

    def _peaks(self, run: "Plan[Any]") -> dict[str, Counter[str]]:
        """Estimate the bytes of each part at the peak of each phase of a run, on the hardware of this command."""
        from algos.lab.memory_plan import peaks

        return peaks(
            run,
            processes=self.gpus,
            cuda=self._on_gpu,
            prompt=self.max_prompt_tokens or DEFAULT_TOKENS,
            new=self.max_new_tokens or DEFAULT_TOKENS,
        )

    def _savings(self) -> dict[str, dict[str, Any]]:
        """Return options that may save memory, in the order to try them, with the changes that they make."""
        config: Any = self.config
        return {
            "--lora r=16": {"lora": "r=16"},
            "--gradient-checkpointing": {"gradient_checkpointing": True},
            "--autocast": {"autocast": True},
            "--dtype bfloat16": {"dtype": "bfloat16"},
            "--config.micro-batch-size 1": {"config": replace(config, micro_batch_size=1)},
            "--shard": {"shard": True},
            "--num-envs 8": {"num_envs": 8},
        }


def _print_phases(phases: dict[str, Counter[str]]) -> None:
    """Print a row for each part of memory, with a column for each phase, in GiB."""
    names = dict.fromkeys(name for parts in phases.values() for name in parts)  # in the order of their first use
    rows = []
    for name in names:
        rows.append([name, *(parts[name] / GIB for parts in phases.values())])
    rows.append(["all", *(parts.total() / GIB for parts in phases.values())])
    print_table(rows, ["GiB", *phases])
