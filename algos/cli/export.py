"""``algos export``: the policy of a saved agent as an ONNX file."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from algos.cli.arguments import Command, load_newest


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write the policy of a saved agent as an ONNX file, for programs without torch."""

    folder: tyro.conf.Positional[str]
    """Run folder of a trained agent, also of one under way (its newest checkpoint), or its name on the hub:
    user/name."""
    to: tyro.conf.Positional[Path]
    """File to write, such as policy.onnx; an earlier one is replaced."""
    all_outputs: bool = False
    """Write the value and the parameters of the action distribution too, beside the most probable action."""
    policy_class: str | None = None
    """Class of the agent's policy, if it is one of your own, which is run only if it is named: file.py:Mine or
    package.module:Mine."""

    def run(self) -> dict[str, object]:
        """Load and write."""
        policy, checkpoint = load_newest(self.folder, policy_class=self.policy_class)
        result: dict[str, object] = {"exported": str(policy.export(self.to, all_outputs=self.all_outputs))}
        if checkpoint is not None:
            result["checkpoint"] = str(checkpoint)
        return result
