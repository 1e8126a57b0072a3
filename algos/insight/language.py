"""What training changed in a language model: next tokens, logit differences, and the parts and heads behind them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algos.comparison.summary import MIN_SEEDS, bootstrap_interval
from algos.insight.attribution import Attribution, attribute
from algos.insight.blocks import PROJECTIONS, Blocks
from algos.insight.finding import Finding, change, compared, draw_lines, draw_maps
from algos.insight.patching import Place, patch
from textenv.lm.model import LanguageModel
from textenv.prompts.prompts import as_prompt
from textenv.prompts.tokenize import prompt_ids, text_ids

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
        compared("logit_difference", f"Logit of {tokens[0]!r} minus that of {tokens[1]!r}", {}, difference),
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
    if not known:
        raise ValueError(f"{text!r} is not in the tokenizer's vocabulary: give one of its tokens")
    if len(ids) > 1:
        split = ", ".join(repr(tokenizer.decode([i])) for i in ids)
        raise ValueError(f"{text!r} is {len(ids)} tokens ({split}), expected one: give its first, or another word")
    return ids


def _values(found: Found, column: Callable[[Attribution], Tensor]) -> dict[str, np.ndarray]:
    """A quantity of each model, ``[prompts, labels]``."""
    return {name: column(x).flatten(1).double().cpu().numpy() for name, x in found.items()}


def _next_tokens(blocks: Mapping[str, Blocks], found: Found) -> Finding:
    def probabilities(name: str, chosen: Any = slice(None)) -> Iterator[Tensor]:  # a prompt at a time: they are large
        return (blocks[name].lm.logits(x[None])[0].softmax(-1)[chosen] for x in found[name].hidden)

    means = [sum(probabilities(name), torch.zeros(())) for name in blocks]
    most = [i for mean in means for i in mean.topk(min(MOST_PROBABLE, len(mean))).indices.tolist()]
    chosen = list(dict.fromkeys(most))
    values = {name: torch.stack([*probabilities(name, chosen)]).double().cpu().numpy() for name in blocks}
    tokenizer = next(iter(blocks.values())).lm.tokenizer
    labels = {"token": [repr(tokenizer.decode([i])) for i in chosen]}
    return compared("next_tokens", "Probability of the next token: the most probable of each model", labels, values)


def _lens(found: Found) -> Finding:
    values = _values(found, lambda x: x.lens)
    draw = partial(draw_lines, panels={"difference": {name: x.mean(0) for name, x in values.items()}}, xlabel="layer")
    title = "Logit lens: the difference if the model ended after a layer (0: after the embedding)"
    labels = {"layer": range(len(change(values)[0]))}
    return compared("logit_lens", title, labels, values, draw, ranked=False)


def _parts(found: Found) -> tuple[Finding, list[Place]]:
    """Contributions of the parts; and these, from the one that moved most."""
    values = _values(found, lambda x: x.parts)
    moved = change(values).mean(0)[:-2]
    places = [Place(layer, part) for part in PROJECTIONS for layer in range(len(moved) // 2)]
    lines = dict(zip(PROJECTIONS, moved.reshape(2, -1), strict=True))
    draw = partial(draw_lines, panels={"change of direct contribution": lines}, xlabel="layer")
    labels = {"part": [*map(str, places), "embedding", "output's biases"]}
    title = "Direct contributions, which add up to the difference"
    return compared("parts", title, labels, values, draw), _most(places, moved)


def _heads(found: Found) -> tuple[Finding, list[Place]]:
    values = _values(found, lambda x: x.heads)
    _, layers, heads = next(iter(found.values())).heads.shape
    moved = change(values).mean(0).reshape(layers, heads)[:, :-1]
    places = [Place(layer, "attention", head) for layer in range(layers) for head in range(heads - 1)]
    labels = {"layer": np.repeat(range(layers), heads).tolist(), "head": [*range(heads - 1), "bias"] * layers}
    rows = [{"change of direct contribution": moved}]
    draw = partial(draw_maps, rows=rows, signed=True, xlabel="head", ylabel="layer")
    title = "Direct contributions of attention heads, and of the biases behind them"
    return compared("heads", title, labels, values, draw), _most(places, moved.ravel())


def _most(places: list[Place], moved: np.ndarray) -> list[Place]:
    return [places[i] for i in np.argsort(-abs(moved), kind="stable")]


def _neurons(found: Found, count: int) -> Finding:
    values = _values(found, lambda x: x.neurons)
    most = np.argsort(-abs(change(values).mean(0)), kind="stable")[:count]
    layer, neuron = np.divmod(most, next(iter(found.values())).neurons.shape[2])
    labels = {"layer": layer.tolist(), "neuron": neuron.tolist()}
    chosen = {name: x[:, most] for name, x in values.items()}
    return compared("neurons", "Direct contributions of MLP neurons", labels, chosen)


def _patching(names: list[str], patched: np.ndarray, before: np.ndarray, after: np.ndarray) -> Finding:
    rows: list[tuple[Any, ...]] = []
    for name, x in zip(names, patched.T[..., None], strict=True):
        both = np.concatenate([after - x, after - before], 1)
        limits = bootstrap_interval(both, _ratio) if len(both) >= MIN_SEEDS and both[:, 1].any() else ("", "")
        share = (_ratio(both), *limits) if both[:, 1].any() else ("", "", "")
        rows.append((name, float(x.mean()), *share))
    title = "Activation patching: the difference with the first model's output at a place; share of the change gone"
    return Finding("patching", title, ("place", "difference", "share", "low", "high"), rows)


def _ratio(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """Ratio of the means of two columns."""
    means = x.mean(axis)
    return means[..., 0] / means[..., 1]


def _attention(blocks: Mapping[str, Blocks], row: Sequence[int], heads: list[Place]) -> Finding:
    tokenizer = next(iter(blocks.values())).lm.tokenizer
    tokens = [ascii(tokenizer.decode([i])) for i in row]
    patterns = {name: x.patterns(row)[None].double().cpu().numpy() for name, x in blocks.items()}
    values = {name: np.concatenate([x[:, head.layer, head.head] for head in heads], 1) for name, x in patterns.items()}
    maps = {f"attention, {ascii(name)[1:-1]}": x.reshape(len(heads), -1) for name, x in values.items()}
    named, count = [f"{head.layer}.{head.head}" for head in heads], range(len(row))
    axes: Any = {"xticks": count, "xticklabels": tokens, "yticks": range(len(heads)), "yticklabels": named}
    labels = {
        "head": np.repeat(named, len(row)).tolist(),
        "position": [*count] * len(heads),
        "token": tokens * len(heads),
    }
    title = "Attention from the first prompt's last position, of the heads (layer.head) that moved most"
    return compared("attention", title, labels, values, partial(draw_maps, rows=[maps], **axes), ranked=False)
