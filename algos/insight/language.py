"""What training changed in a language model: next tokens, logit differences, and the parts and heads behind them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from algos.comparison.summary import MIN_SEEDS, bootstrap_interval
from algos.insight.attribution import Attribution, attribute
from algos.insight.blocks import PROJECTIONS, Blocks
from algos.insight.finding import Finding
from algos.insight.patching import Place, patch
from textenv.lm.model import LanguageModel
from textenv.prompts.prompts import as_prompt
from textenv.prompts.tokenize import prompt_ids, text_ids

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PROBABLE, MOVED = 10, 5
"""Most probable tokens of each model that are listed; heads, and other parts, that moved most and are patched."""
Found = Mapping[str, Attribution]
"""Attribution of each model, the first of which is that before training."""


@torch.no_grad()
def interpret_language(
    models: Mapping[str, LanguageModel], prompts: Sequence[Any], tokens: Sequence[str], *, neurons: int = 0
) -> list[Finding]:
    """Compare language models at the ends of prompts; changes are those from the first model to the second.

    Args:
        models: two or more models of one architecture and tokenizer, by their names in tables.
        prompts: texts, token ids or chats; from `MIN_SEEDS` on, changes have 95 % limits over the prompts.
        tokens: two tokens, or two sets with ``|`` between tokens, whose mean logits are subtracted.
        neurons: number of MLP neurons to list, those that moved most; memory then grows with the prompts.

    Raises:
        ValueError: if a text is not one token, or a model does not fit the others or `Blocks`.
    """
    blocks = {name: Blocks(lm) for name, lm in models.items()}
    if len(blocks) < 2 or len(tokens) != 2 or not prompts:
        given = f"{len(blocks)} different models, {len(tokens)} tokens and {len(prompts)} prompts"
        raise ValueError(f"{given}, expected at least 2 models, 2 tokens and at least 1 prompt")
    base, tuned, *_ = blocks.values()
    tokenizer = base.lm.tokenizer
    for name, x in blocks.items():
        shape = len(x.blocks), x.num_heads, x.lm.tokenizer.get_vocab()
        if shape != (len(base.blocks), base.num_heads, tokenizer.get_vocab()):
            raise ValueError(f"{name} has other layers, heads or tokens than {next(iter(blocks))}: expected the same")
    pair = token_ids(tokens[0], tokenizer), token_ids(tokens[1], tokenizer)
    if set(pair[0]) & set(pair[1]):
        raise ValueError(f"{tokens[0]!r} and {tokens[1]!r} have a token in common, expected different ones")
    rows = [prompt_ids(as_prompt(i, prompt), tokenizer) for i, prompt in enumerate(prompts)]
    found = {name: attribute(x, rows, pair, neurons=neurons > 0) for name, x in blocks.items()}
    parts, by_part = _parts(found)
    heads, by_head = _heads(found)
    difference = _values(found, lambda x: x.difference[:, None])
    runs = [*([place] for place in (*by_head[:MOVED], *by_part[:MOVED])), by_head[:MOVED]]
    patched = patch(base, tuned, rows, pair, runs).double().cpu().numpy()
    findings = [
        _table("logit_difference", f"Logit of {tokens[0]!r} minus that of {tokens[1]!r}", {"": [""]}, difference),
        _next_tokens(blocks, found),
        _lens(found),
        parts,
        heads,
        _patching([" + ".join(map(str, run)) for run in runs], patched, *list(difference.values())[:2]),
        _attention(blocks, rows[0], by_head[:MOVED]),
    ]
    return [*findings, _neurons(found, neurons)] if neurons else findings


def token_ids(text: str, tokenizer: Any) -> list[int]:
    """Ids of a token, or of several with ``|`` between; raises a ValueError if a text is no single token."""
    ids = text_ids(text, tokenizer)
    known = bool(ids) and tokenizer.decode(ids).strip() == text.strip()  # an unknown word is read as another one
    if "|" in text and (len(ids) > 1 or not known):
        return [i for part in text.split("|") for i in token_ids(part, tokenizer)]
    special = tokenizer.get_vocab().get(text)
    if special is not None and tokenizer.decode([special]) == text:
        return [special]
    if not known:
        raise ValueError(f"{text!r} is not in the tokenizer's vocabulary: give one of its tokens")
    if len(ids) > 1:
        split = ", ".join(repr(tokenizer.decode([i])) for i in ids)
        raise ValueError(f"{text!r} is {len(ids)} tokens ({split}), expected one: give its first, or another word")
    return ids


def _values(found: Found, column: Callable[[Attribution], Tensor]) -> dict[str, np.ndarray]:
    """A quantity of each model, ``[prompts, labels]``."""
    return {name: column(x).flatten(1).double().cpu().numpy() for name, x in found.items()}


def _change(values: Mapping[str, np.ndarray]) -> np.ndarray:
    base, tuned, *_ = values.values()
    return tuned - base


def _limits(x: np.ndarray, statistic: Any = np.mean) -> tuple[float | str, ...]:
    """95 % limits over the prompts; empty if they are too few."""
    return tuple(map(float, bootstrap_interval(x, statistic))) if len(x) >= MIN_SEEDS else ("", "")


def _table(
    name: str, title: str, labels: Mapping[str, Sequence[Any]], values: Mapping[str, np.ndarray], draw: Any = None
) -> Finding:
    """Means of ``[prompts, labels]`` for each model, and the change; first what changed most, but layers in order."""
    rows: list[tuple[Any, ...]] = []
    for i, (change, *keys) in enumerate(zip(_change(values).T, *labels.values(), strict=True)):
        means = (float(x[:, i].mean()) for x in values.values())
        rows.append((*keys, *means, float(change.mean()), *_limits(change)))
    if [*labels] != ["layer"]:
        rows.sort(key=lambda row: -abs(row[-3]))
    return Finding(name, title, (*labels, *values, "change", "low", "high"), rows, draw)


def _next_tokens(blocks: Mapping[str, Blocks], found: Found) -> Finding:
    def probabilities(name: str) -> Iterator[Tensor]:  # of all tokens, for one prompt at a time
        return (blocks[name].lm.logits(x).softmax(-1) for x in found[name].hidden)

    chosen: dict[int, None] = {}
    for name in blocks:
        mean = functools.reduce(torch.add, probabilities(name))
        chosen |= dict.fromkeys(mean.topk(min(MOST_PROBABLE, len(mean))).indices.tolist())
    values = {
        name: torch.stack([x[list(chosen)] for x in probabilities(name)]).double().cpu().numpy() for name in blocks
    }
    tokenizer = next(iter(blocks.values())).lm.tokenizer
    labels = {"token": [repr(tokenizer.decode([i])) for i in chosen]}
    return _table("next_tokens", "Probability of the next token: the most probable ones of each model", labels, values)


def _lens(found: Found) -> Finding:
    values = _values(found, lambda x: x.lens)
    draw = functools.partial(_lines, {name: x.mean(0) for name, x in values.items()}, "difference")
    title = "Logit lens: the difference if the model ended after a layer (0: after the embedding)"
    return _table("logit_lens", title, {"layer": range(next(iter(values.values())).shape[1])}, values, draw)


def _parts(found: Found) -> tuple[Finding, list[Place]]:
    """Contributions of the parts; and these, from the one that moved most."""
    values = _values(found, lambda x: x.parts)
    change = _change(values).mean(0)[:-2]
    places = [Place(layer, part) for part in PROJECTIONS for layer in range(len(change) // 2)]
    lines = dict(zip(PROJECTIONS, change.reshape(2, -1), strict=True))
    title, labels = "Direct contributions, which add up to the difference", [*places, "embedding", "output's biases"]
    draw = functools.partial(_lines, lines, "change of direct contribution")
    return _table("parts", title, {"part": [*map(str, labels)]}, values, draw), _most(places, change)


def _heads(found: Found) -> tuple[Finding, list[Place]]:
    values = _values(found, lambda x: x.heads)
    _, layers, heads = next(iter(found.values())).heads.shape
    change = _change(values).mean(0).reshape(layers, heads)[:, :-1]
    places = [Place(layer, "attention", head) for layer in range(layers) for head in range(heads - 1)]
    labels = {"layer": np.repeat(range(layers), heads).tolist(), "head": [*range(heads - 1), "bias"] * layers}
    axes = {"xlabel": "head", "ylabel": "layer"}
    draw = functools.partial(_picture, change, axes, "change of direct contribution")
    title = "Direct contributions of attention heads, and of the biases behind them"
    return _table("heads", title, labels, values, draw), _most(places, change.ravel())


def _most(places: list[Place], change: np.ndarray) -> list[Place]:
    return [places[i] for i in np.argsort(-abs(change), kind="stable")]


def _neurons(found: Found, count: int) -> Finding:
    values = _values(found, lambda x: x.neurons)
    most = np.argsort(-abs(_change(values).mean(0)), kind="stable")[:count]
    layer, neuron = np.divmod(most, next(iter(found.values())).neurons.shape[2])
    values = {name: x[:, most] for name, x in values.items()}
    return _table(
        "neurons", "Direct contributions of MLP neurons", {"layer": layer.tolist(), "neuron": neuron.tolist()}, values
    )


def _patching(names: list[str], patched: np.ndarray, before: np.ndarray, after: np.ndarray) -> Finding:
    rows: list[tuple[Any, ...]] = []
    for name, x in zip(names, patched.T[..., None], strict=True):
        both = np.concatenate([after - x, after - before], 1)
        share = (float(_ratio(both)), *_limits(both, _ratio)) if both[:, 1].any() else ("", "", "")
        rows.append((name, float(x.mean()), *share))
    title = (
        "Activation patching: the difference with the first model's output at a place, and the share of the change gone"
    )
    return Finding("patching", title, ("place", "difference", "share", "low", "high"), rows)


def _ratio(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """Ratio of the means of two columns."""
    means = x.mean(axis)
    return means[..., 0] / means[..., 1]


def _attention(blocks: Mapping[str, Blocks], row: Sequence[int], heads: list[Place]) -> Finding:
    tokenizer = next(iter(blocks.values())).lm.tokenizer
    tokens = [ascii(tokenizer.decode([i])) for i in row]
    patterns = {name: x.patterns(row).double().cpu().numpy() for name, x in blocks.items()}
    rows: list[tuple[Any, ...]] = [
        (head.layer, head.head, i, token, *(float(x[head.layer, head.head, i]) for x in patterns.values()))
        for head in heads
        for i, token in enumerate(tokens)
    ]
    image = np.array([x[head.layer, head.head] for head in heads for x in patterns.values()])
    names = [f"{head.layer}.{head.head} {ascii(name)[1:-1]}" for head in heads for name in patterns]
    axes = {"xticks": range(len(row)), "yticks": range(len(names)), "xticklabels": tokens, "yticklabels": names}
    title = "Attention from the first prompt's last position, of the heads that moved most"
    columns = ("layer", "head", "position", "token", *patterns)
    return Finding("attention", title, columns, rows, functools.partial(_picture, image, axes, "attention"))


def _lines(lines: Mapping[str, np.ndarray], quantity: str, figure: Figure) -> None:
    axis = figure.subplots()
    for name, values in lines.items():
        axis.plot(values, marker=".", label=ascii(name)[1:-1])
    axis.set(xlabel="layer", ylabel=quantity)
    axis.legend()


def _picture(values: np.ndarray, axes: Mapping[str, Any], quantity: str, figure: Figure) -> None:
    """Heat map whose white is 0."""
    axis, most = figure.subplots(), abs(values).max() or 1
    colours = axis.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    axis.set(**axes)
    axis.tick_params("x", rotation=90 * ("xticklabels" in axes))
    figure.colorbar(colours, label=quantity)
