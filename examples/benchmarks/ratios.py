"""The summary at the top of docs/results/speed.md: a table and a figure of the ratios in the page's data files.

    python examples/benchmarks/ratios.py                        # after a new measurement
    python examples/benchmarks/page.py docs/results/speed.md

It measures nothing. It writes docs/results/data/speed.json, which the second command puts on the page, and
docs/figures/speed.svg. Equal data give equal files.
"""

import json
from dataclasses import dataclass

from page import DATA, ROOT
from pictures import COLOURS, new_figure, save

TABLE = DATA / "speed.json"
FIGURE = ROOT / "docs" / "figures" / "speed.svg"
COLUMNS = ["work", "beside", "time", "memory"]
NAMES = {"sb3": "Stable-Baselines3", "cleanrl_style": "CleanRL-style"}
"""Of peers whose name in the data files is an abbreviation."""


@dataclass(frozen=True)
class Line:
    """A line of the summary: where its ratios stand.

    Attributes:
        work: what both do.
        section: heading of the page.
        file: stem of the data file.
        case: of the row with times or speeds.
        peer: of the row, as the file has it.
        memory: case of the row with memory, if there is one.
        goal: the ratio of times that we want to reach, if we have set one.
    """

    work: str
    section: str
    file: str
    case: str
    peer: str
    memory: str | None = None
    goal: float | None = None


def _iteration(work, section, file, case, peer="TRL GRPO", *, goal=None):
    """A line of an iteration on text, which has seconds and the memory of the process."""
    return Line(work, section, file, f"{case} seconds", peer, memory=f"{case} memory in all", goal=goal)


TRL_PPO = "TRL 0.11 PPO step"
LINES = (
    Line("PPO, CartPole, 64 × 32 steps", "Control", "control", "fast train", "sb3", "fast train memory", goal=3.0),
    Line("PPO, CartPole, 64 × 32 steps", "Control", "control", "fast train", "skrl", "fast train memory", goal=2.2),
    Line("PPO, CartPole, 4 × 128 steps", "Control", "control", "cleanrl train", "sb3", "cleanrl train memory"),
    Line("PPO, Pendulum", "Control", "control", "pendulum train", "sb3"),
    Line("PPO, LSTM", "Control", "control", "lstm train", "sb3"),
    Line("PPO, images", "Control", "control", "cnn train", "sb3"),
    Line("PPO, HalfCheetah", "Control", "mujoco-speed", "HalfCheetah-v5", "CleanRL-style", goal=2.0),
    Line("PPO, Hopper", "Control", "mujoco-speed", "Hopper-v5", "CleanRL-style", goal=2.0),
    Line("SAC, HalfCheetah", "SAC and TD3", "off-policy", "HalfCheetah-v5, SAC", "Stable-Baselines3", goal=1.5),
    Line("TD3, HalfCheetah", "SAC and TD3", "off-policy", "HalfCheetah-v5, TD3", "Stable-Baselines3", goal=1.5),
    Line("import textenv", "Start-up", "startup", "import textenv", "import gymnasium"),
    Line(
        "first iteration, CartPole", "Start-up", "startup", "algos train CartPole-v1, first iteration",
        "import torch, tensordict, gymnasium",
    ),
    Line("generation, tiny", "Text", "text", "generation tiny", "transformers.generate", goal=1.5),
    _iteration("PPO, tiny, full length", "Text", "text", "ppo iteration tiny", TRL_PPO, goal=1.4),
    _iteration("GRPO, tiny, full length", "Text", "text", "grpo iteration tiny", goal=1.4),
    _iteration("PPO, small, full length", "Text", "text-small", "ppo iteration small", TRL_PPO, goal=1.4),
    _iteration(
        "PPO, small, varying length", "Text", "text-small", "ppo iteration, varying lengths, small", TRL_PPO,
        goal=2.0,
    ),
    _iteration("GRPO, small, varying length", "Text", "text-small", "grpo iteration, varying lengths, small", goal=2.0),
    Line(
        "PPO, CartPole in words", "Words and programs", "words-speed", "CartPole-v1, embedded model",
        "LanguageWrapper",
    ),
    Line("a program, tiny", "Words and programs", "programs", "a program, embedded", "string environment", goal=0.8),
    Line("a program, SmolLM2", "Words and programs", "programs", "a program, smollm2", "string environment", goal=0.8),
    _iteration("PPO, SmolLM2, LoRA", "SmolLM2", "smollm2", "SmolLM2 ppo, lora"),
    _iteration("GRPO, SmolLM2, LoRA", "SmolLM2", "smollm2", "SmolLM2 grpo, lora"),
    _iteration("GRPO, SmolLM2, all weights", "SmolLM2", "smollm2", "SmolLM2 grpo, full"),
    _iteration("GRPO, SmolLM2, LoRA, bfloat16", "SmolLM2", "smollm2-bfloat16", "SmolLM2 grpo, lora, bfloat16"),
    Line("generation, .5 billion", "On a GPU", "gpu", "generation", "transformers.generate, dynamic cache"),
    Line("PPO's update, .5 billion", "On a GPU", "gpu", "update", "40 % of the bare bf16 product", goal=1.0),
)  # fmt: skip
"""The lines of the summary, in the order of the page."""


def read(name):
    """A data file of the page."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def ratios(line, case):
    """Lowest, median and highest ratio of a case of a line.

    Raises:
        ValueError: if the file has no such row, or the row has no ratio.
    """
    for row in read(line.file)["rows"]:
        if (row["case"], row["peer_name"]) == (case, line.peer):
            if row["ratio"] is None:
                raise ValueError(f"{line.file}.json: {case!r} beside {line.peer!r} has no ratio: {row['note']}")
            of_pairs = row.get("ratios") or [row["ratio"]]
            return min(of_pairs), row["ratio"], max(of_pairs)
    raise ValueError(f"{line.file}.json has no row {case!r} beside {line.peer!r}: measure it, or change LINES")


def cells(line):
    """A row of the table."""
    low, middle, high = ratios(line, line.case)
    time = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    if line.goal is not None:
        if low >= line.goal:
            verdict = "reached"
        elif high < line.goal:
            verdict = "**not reached**"
        else:
            verdict = "reached by some pairs"
        time += f"; goal {line.goal:.3g}: {verdict}"
    memory = ""
    if line.memory is not None:
        memory = f"{ratios(line, line.memory)[1]:.2f}"
    anchor = line.section.lower().replace(" ", "-")
    return [f"[{line.work}](#{anchor})", NAMES.get(line.peer, line.peer), time, memory]


def summary():
    """The table, in the format of docs/results/data: dates and commits are those of the files that it sums up."""
    files = [read(name) for name in dict.fromkeys(line.file for line in LINES)]
    dates = sorted(data["date"] for data in files)
    period = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    depends = {}
    for data in files:
        depends |= data["depends"]
    return {
        "command": "python examples/benchmarks/ratios.py",
        "date": period,
        "commit": ", ".join(sorted({data["commit"] for data in files})),
        "machine": "machines of the tables below",
        "final": all(data.get("final", True) for data in files),
        "others": max(data.get("others", 0.0) for data in files),
        "depends": dict(sorted(depends.items())),
        "columns": COLUMNS,
        "rows": [cells(line) for line in LINES],
    }


def draw(path):
    """Draw the ratios of the table, with the range of the pairs of the times."""
    figure, axes = new_figure("speed", size=(10.3, 4.5))
    axes.axvline(1, color="0.3", lw=1)
    time_colour, memory_colour = COLOURS[:2]

    # A height for each line: times with their range, goals that we have set, memory
    for height, line in enumerate(LINES):
        low, middle, high = ratios(line, line.case)
        axes.plot([low, high], [height, height], color=time_colour, lw=2)
        axes.plot(middle, height, "o", color=time_colour, label="time")
        if line.goal is not None:
            axes.plot(line.goal, height, "|", color="black", ms=10, mew=2, label="goal")
        if line.memory is not None:
            axes.plot(ratios(line, line.memory)[1], height, "D", ms=5, color=memory_colour, label="memory")

    # Names, and a logarithmic axis, on which twice and half are equally far from 1
    labels = [f"{line.work} beside {NAMES.get(line.peer, line.peer)}" for line in LINES]
    axes.set_yticks(range(len(LINES)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    ticks = [0.25, 0.5, 1, 1.5, 2, 3, 4]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("times as fast, or as little memory (above 1: ours is better)")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)

    # One entry of the legend for each kind of mark
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), loc="lower left", frameon=False)
    save(figure, path)


def main():
    """Write the table and the figure."""
    TABLE.write_text(json.dumps(summary(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(FIGURE)


if __name__ == "__main__":
    main()
