"""Episodes of text token by token: as a page in one file, which loads nothing, and in the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from algos.advantages import gae
from algos.evaluation import evaluate
from algos.lab.comparison.page import render, samples_data
from textenv.kl.penalty import KLPenalty
from textenv.rendering import answer_tokens, render_rollout

COLUMNS = {
    "log_ratio": "log-ratio to the reference, nats", "kl": "KL to the reference over all tokens, nats",
    "entropy": "entropy, nats", "value": "value", "advantage": "advantage", "reward": "reward",
}  # fmt: skip
"""Columns of `measured`, and their names on the page; the first two need a reference."""


def show_tokens(env: Any, policy: Any, where: str, *, config: Mapping[str, Any], **options: Any) -> None:
    """Play episodes of text (`algos.evaluation.evaluate`), and write a page, or print them shaded by a quantity.

    ``where`` is the page's path (``.html``) or one of `COLUMNS`; raises a ValueError if it is neither, or has no
    reference. ``config`` has the hyper-parameters of the advantages, see `measured`.
    """
    rollout = evaluate(env, policy, **options).rollout
    samples = env.samples(range(len(rollout))) or [{}] * len(rollout)
    rollout = measured(rollout, policy, penalty=env.penalty, config=config)
    known = [name for name in COLUMNS if name in rollout.keys()]
    if where.endswith(".html"):
        Path(where).write_text(page(rollout, policy.tokenizer, samples), encoding="utf-8")
        return
    if where not in known:
        raise ValueError(f"tokens is {where!r}, expected a page such as out.html, or one of {', '.join(known)}")
    for row, sample in enumerate(samples):
        print(f"\nepisode {row + 1}, score {sample.get('score')}, {COLUMNS[where]} (positive green, negative red):")
        print(render_rollout(rollout, row, policy.tokenizer, column=where))


@torch.no_grad()
def measured(rollout: TensorDict, policy: Any, *, penalty: KLPenalty | None, config: Mapping[str, Any]) -> TensorDict:
    """Copy of a text rollout with `COLUMNS`; advantages count the penalty; γ = λ = 1 unless the config differs."""
    reward, rollout = rollout["reward"].clone(), rollout.to(policy.device).clone()
    if penalty is not None:
        penalty(rollout, policy)
        rollout["log_ratio"] = rollout["log_prob"] - rollout["reference_log_prob"]
        rollout["kl"] = policy.divergence(rollout, penalty.reference)
    rollout["entropy"] = policy.evaluate(rollout).entropy
    rollout["value"], rollout["next_value"] = policy.values(rollout)
    columns = {name: rollout[name] for name in ("reward", "value", "next_value", "truncated", "mask")}
    columns["terminated"] = rollout["terminated"] | (rollout["truncated"] & (not config.get("bootstrap_truncated")))
    rollout["advantage"], _ = gae(**columns, gamma=config.get("gamma", 1.0), gae_lambda=config.get("gae_lambda", 1.0))
    return rollout.cpu().update({"reward": reward})


def page(rollout: TensorDict, tokenizer: Any, samples: list[dict[str, Any]]) -> str:
    """HTML of a text rollout with some of `COLUMNS`; ``samples`` are those of its environment."""
    rows = []
    for row, sample in enumerate(samples):
        shown = {"score": sample.get("score"), "parts": sample.get("parts", {}), "episode": row + 1}
        texts = {"prompt": sample.get("prompt", ""), "completion": sample.get("completion", "")}
        if "kl" in rollout.keys():
            shown["kl"] = rollout["kl"][row][rollout["mask"][row]].sum().item()
        rows.append(shown | texts | {"tokens": answer_tokens(rollout, row, tokenizer, COLUMNS)})
    return render("tokens.html", title="Episodes token by token", data=samples_data(rows, COLUMNS))
