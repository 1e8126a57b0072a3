"""Episodes of text token by token: as a page in one file, which loads nothing, and in the terminal."""

import itertools
import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from algos.advantages import gae
from algos.evaluation import evaluate
from textenv.kl.penalty import KLPenalty
from textenv.rendering import episode_tokens, pieces, printable, render_rollout

COLUMNS = {
    "log_ratio": "log-ratio to the reference, nats", "kl": "KL to the reference over all tokens, nats",
    "entropy": "entropy, nats", "value": "value", "advantage": "advantage", "reward": "reward",
}  # fmt: skip
"""Columns of `measured`, and their names on the page; the first two need a reference."""
LOOK = """:root { color-scheme: light dark } body { font: 16px/1.6 sans-serif; max-width: 75rem; margin: auto }
nav { position: sticky; top: 0; padding: .7rem .5rem; background: Canvas } small, .other { opacity: .7 }
section { display: grid; grid-template-columns: 1fr 16rem; gap: 2rem; border-top: 1px solid; padding: 1rem .5rem }
div { white-space: pre-wrap; overflow-wrap: anywhere } table { align-self: start } td { padding-right: 1rem }"""
SCRIPT = """const choice = document.querySelector("select"), tokens = [...document.querySelectorAll("span")];
const values = tokens.map(x => JSON.parse(x.dataset.v));
tokens.forEach((x, i) => x.title = [...choice.options].map((o, k) => `${o.text}: ${values[i][k]}`).join("\\n"));
choice.onchange = () => {
  const k = choice.value, most = values.reduce((top, each) => Math.max(top, Math.abs(each[k])), 0);
  tokens.forEach((x, i) => x.style.background =
    `rgb(${values[i][k] < 0 ? "220 60 50" : "30 160 70"} / ${0.8 * Math.abs(values[i][k]) / (most || 1)})`);
  document.querySelector("output").textContent = `positive green, negative red; strongest ${most.toPrecision(3)}`;
}
choice.onchange();"""


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
    known = [name for name in COLUMNS if name in rollout.keys()]
    choices = "".join(f'<option value="{i}">{COLUMNS[name]}</option>' for i, name in enumerate(known))
    episodes = ""
    for row, sample in enumerate(samples):
        numbers = {"episode": row + 1, "score": sample.get("score"), **sample.get("parts", {})}
        texts = {escape(printable(str(name))): x if x is None else f"{x:.4g}" for name, x in numbers.items()}
        cells = "".join(f"<tr><td>{name}<td>{text}" for name, text in texts.items())
        turns = "".join(_turns(rollout, row, tokenizer, known))
        episodes += f"<section><main>{turns}</main><table>{cells}</table></section>\n"
    return f"""<!doctype html><meta charset="utf-8"><title>Tokens</title><style>{LOOK}</style>
<nav>Shaded by <select>{choices}</select> <small><output></output></small></nav>
{episodes}<script>{SCRIPT}</script>
"""


def _turns(rollout: TensorDict, row: int, tokenizer: Any, known: list[str]) -> Iterator[str]:
    """HTML of an episode's prompt, the policy's turns with their sums, and the replies."""
    tokens, chosen, _ = episode_tokens(rollout, row, "reward")
    values = np.nan_to_num(np.stack([episode_tokens(rollout, row, name)[2] for name in known], axis=1)).round(5)
    texts = [escape(text or "·").replace("\n", "⏎\n") for text in pieces(tokens, tokenizer)]
    for own, group in itertools.groupby(range(len(tokens)), key=lambda i: bool(chosen[i])):
        places = list(group)
        if own:
            spans = "".join(f'<span data-v="{json.dumps(values[i].tolist())}">{texts[i]}</span>' for i in places)
            sums = dict(zip(known, values[places].sum(0), strict=True))
            summed = ", ".join(f"{name} {sums[name]:.3g}" for name in sums if name in ("log_ratio", "kl", "reward"))
            yield f"<small>policy: {len(places)} tokens, {summed}</small><div>{spans}</div>"
        else:
            yield f'<div class="other">{"".join(texts[i] for i in places)}</div>'
