"""``algos plan``: the memory that a training takes, before it is started."""

from dataclasses import dataclass, replace
from typing import Any

from algos.cli.tables import print_table
from algos.cli.train import AnyConfig, Train
from algos.make import is_text

MARGIN = 1.1
"""Memory to have for each byte of tensors: allocators keep freed pieces, and CUDA takes some itself."""


@dataclass(frozen=True, kw_only=True)
class Plan(Train[AnyConfig]):
    """Estimate the peak memory of a training of text, and what makes it fit; takes all options of train.

    No weights are read. Texts are as long as they may be: without --max-prompt-tokens and --max-new-tokens, 128 each.
    """

    gpus: int = 1
    """Processes with a GPU each, which share the rows (torchrun)."""
    gpu_memory: float | None = None
    """Memory of a GPU in GiB; None: what is free on --device."""

    def run(self) -> dict[str, Any]:
        """Print the parts of memory by phase, and the options to add until it fits; return the outcome."""
        if not is_text(self.env) or self.algo == "trpo":
            raise ValueError(f"plan is for text and every algorithm but trpo, not for {self.algo} on {self.env}")
        if min(self.gpus, 1 if self.gpu_memory is None else self.gpu_memory) <= 0:
            raise ValueError(f"--gpus is {self.gpus} and --gpu-memory {self.gpu_memory}, expected numbers above 0")
        from algos.lab.memory_plan import free_memory, peaks

        def estimate(**changes: Any) -> Any:
            lengths = {"prompt": self.max_prompt_tokens or 128, "new": self.max_new_tokens or 128}
            cuda = self.gpu_memory is not None or self.device not in (None, "cpu")
            return peaks(replace(run, **changes), processes=self.gpus, cuda=cuda, **lengths)

        run, room = self._located(), free_memory(self.device) if self.gpu_memory is None else self.gpu_memory * 2**30
        room, phases, kept, added = room or float("inf"), estimate(), dict[str, Any](), list[Any]()
        peak, phase = max((parts.total(), name) for name, parts in phases.items())
        result = {"peak GiB": peak / 2**30, "phase": phase, "fits": peak * MARGIN <= room}
        config: Any = self.config
        switches: dict[str, dict[str, Any]] = {
            "--lora r=16": {"lora": "r=16"}, "--gradient-checkpointing": {"gradient_checkpointing": True},
            "--autocast": {"autocast": True}, "--dtype bfloat16": {"dtype": "bfloat16"},
            "--config.micro-batch-size 1": {"config": replace(config, micro_batch_size=1)},
            "--shard": {"shard": True}, "--num-envs 8": {"num_envs": 8},
        }  # fmt: skip
        for option, change in switches.items():
            if peak * MARGIN > room:
                lower = max(parts.total() for parts in estimate(**kept, **change).values())
                if lower < 0.99 * peak:
                    added.append({"add": option, "saves GiB": (peak - lower) / 2**30, "then GiB": lower / 2**30})
                    kept, peak = kept | change, lower
        result |= {} if result["fits"] else {"fits with these options": peak * MARGIN <= room}
        if self.json:
            return result | {"phases": phases, "options": added}
        parts = dict.fromkeys(part for each in phases.values() for part in each)
        rows = [[part, *(each[part] / 2**30 for each in phases.values())] for part in parts]
        print_table([*rows, ["all", *(each.total() / 2**30 for each in phases.values())]], ["GiB", *phases])
        if added:
            print_table([each.values() for each in added], [*added[0]])
        return result
