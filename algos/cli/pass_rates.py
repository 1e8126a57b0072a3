"""Options by which ``algos train``, ``algos evaluate`` and ``algos compare`` sample each prompt several times."""

from dataclasses import dataclass
from typing import Any

from algos.cli.arguments import flag


@dataclass(frozen=True, kw_only=True)
class PassRateOptions:
    """Several samples of each prompt, and the pass rates that they give."""

    k: tuple[int, ...] | None = None
    """Text only: in evaluations, sample each prompt several times, and give pass@k (one of k samples passes) and maj@k
    (the most frequent answer of k samples passes), with 95 percent limits over the prompts: --k 1 8 64."""
    num_samples: int | None = None
    """With --k: samples of each prompt; None: the largest k."""
    num_prompts: int | None = None
    """With --k: number of prompts; None: all of the test split."""
    by: str | None = None
    """With --k: column of the prompts, by whose values the pass rates are broken down: --by level."""
    success: float = 1.0
    """With --k: an episode passes if its return is at least this."""
    answer: str | None = None
    """With --k: function from a completion to the answer that is voted on, which is run only if it is named:
    rewards.py:function or package.module:function; None: the task's own, or the completion."""

    def sampling_arguments(self) -> dict[str, Any]:
        """Return these options as arguments of `algos.evaluate` and `algos.compare`.

        Raises:
            ValueError: if a number is out of its range, or another option is given without ``--k``.
        """
        from algos.statistics.pass_rates import read_sampling
        from textenv.importing import load_function

        # Without --k
        others = ("num_samples", "num_prompts", "by", "success", "answer")
        typed = [name for name in others if getattr(self, name) != getattr(PassRateOptions, name)]
        if self.k is None and typed:
            raise ValueError(f"{flag(typed[0])} is for several samples of each prompt: add --k, such as --k 1 8")

        # With it
        answer: Any = None
        if self.answer is not None:
            answer = load_function(self.answer)
        arguments: dict[str, Any] = {
            "k": self.k,
            "num_samples": self.num_samples,
            "num_prompts": self.num_prompts,
            "by": self.by,
            "success": self.success,
            "answer": answer,
        }
        read_sampling(**arguments)  # raises now, before anything is loaded
        return arguments
