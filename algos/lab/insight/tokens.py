"""Episodes of text token by token: as a page in one file, which loads nothing, and in the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from algos.advantages import gae
from algos.evaluation import evaluate
from algos.lab.comparison.page import render, samples_data
from algos.policies.policy import Policy
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.penalty import KLPenalty
from textenv.rendering import answer_tokens, render_rollout
from textenv.rollout import Sample, episode_of_row, join_episodes, next_values, split_column

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from algos.policies.lm import LMPolicy

COLUMNS = {
    "log_ratio": "log-ratio to the reference, nats",
    "kl": "KL to the reference over all tokens, nats",
    "entropy": "entropy, nats",
    "value": "value",
    "advantage": "advantage",
    "reward": "reward",
}
"""Columns of `measured`, and their names on the page; the first two need a reference."""


def show_tokens(
    env: TextVectorEnv, policy: "LMPolicy", where: str, *, config: Mapping[str, object], **options: Any
) -> None:
    """Play episodes of text (`algos.evaluation.evaluate`), and write a page, or print them shaded by a quantity.

    Args:
        env, policy, options: see `algos.evaluation.evaluate`.
        where: the page's path (``.html``), or one of `COLUMNS` to print.
        config: hyper-parameters of the advantages, see `measured`.

    Raises:
        ValueError: if ``where`` is neither, or a quantity that needs a reference where there is none.
    """
    rollout = evaluate(env, policy, **options).rollout
    samples = env.samples(episode_of_row(rollout).tolist())  # a row of an episode has the sample of the episode
    if not samples:
        no_texts: Sample = {"prompt": "", "completion": "", "score": None, "parts": {}}
        samples = [no_texts] * len(rollout)
    rollout = measured(rollout, policy, penalty=env.penalty, config=config)
    if where.endswith(".html"):
        Path(where).write_text(page(rollout, policy.tokenizer, samples), encoding="utf-8")
        return

    columns = [name for name in COLUMNS if name in rollout.keys()]
    if where not in columns:
        raise ValueError(f"tokens is {where!r}, expected a page such as out.html, or one of {', '.join(columns)}")
    for row, sample in enumerate(samples):
        episode = int(episode_of_row(rollout)[row]) + 1
        print(f"\nepisode {episode}, score {sample['score']}, {COLUMNS[where]} (positive green, negative red):")
        print(render_rollout(rollout, row, policy.tokenizer, column=where))


@torch.no_grad()
def measured(
    rollout: TensorDict, policy: Policy, *, penalty: KLPenalty | None, config: Mapping[str, Any]
) -> TensorDict:
    """Return a copy of a text rollout with `COLUMNS`, on the CPU.

    Advantages count the penalty; the column ``reward`` does not. Fields that ``config`` lacks are 1 (``gamma``,
    ``gae_lambda``) or False (``bootstrap_truncated``).
    """
    reward = rollout["reward"].clone()
    rollout = rollout.to(policy.device).clone()

    # Reference, policy and values
    if penalty is not None:
        penalty(rollout, policy)
        rollout["log_ratio"] = rollout["log_prob"] - rollout["reference_log_prob"]
        rollout["kl"] = policy.divergence(rollout, penalty.reference)
    rollout["entropy"] = policy.evaluate(rollout).entropy
    value, next_value = policy.values(rollout)
    rollout["value"] = value
    rollout["next_value"] = next_values(rollout, value=value, next_value=next_value)

    # Advantages; an episode that was cut off ends there, unless it is bootstrapped
    episodes = join_episodes(rollout)
    terminated = episodes["terminated"]
    if not config.get("bootstrap_truncated"):
        terminated = terminated | episodes["truncated"]
    advantage, _ = gae(
        reward=episodes["reward"],
        value=episodes["value"],
        next_value=episodes["next_value"],
        terminated=terminated,
        truncated=episodes["truncated"],
        mask=episodes["mask"],
        gamma=config.get("gamma", 1.0),
        gae_lambda=config.get("gae_lambda", 1.0),
    )
    rollout["advantage"] = split_column(advantage, rollout)
    return rollout.cpu().update({"reward": reward})


def page(rollout: TensorDict, tokenizer: "PreTrainedTokenizerBase", samples: Sequence[Sample]) -> str:
    """Return the HTML of a text rollout with some of `COLUMNS`; ``samples`` has that of each row's episode."""
    rows = []
    episodes = episode_of_row(rollout).tolist()
    for i, sample in enumerate(samples):
        row: dict[str, object] = {"score": sample["score"], "parts": sample["parts"], "episode": episodes[i] + 1}
        if "kl" in rollout.keys():
            row["kl"] = rollout["kl"][i][rollout["mask"][i]].sum().item()
        row["prompt"] = sample["prompt"]
        row["completion"] = sample["completion"]
        row["tokens"] = answer_tokens(rollout, i, tokenizer, COLUMNS)
        rows.append(row)
    return render("tokens.html", title="Episodes token by token", data=samples_data(rows, COLUMNS))
