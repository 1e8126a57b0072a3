"""What training changed in a language model: next tokens, logit differences, and the parts and heads behind them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algos.lab.comparison.summary import limits
from algos.lab.insight.attribution import Attribution, Place, attribute, patch
from algos.lab.insight.blocks import PROJECTIONS, Blocks
from algos.lab.insight.finding import Finding, change, compared, draw_lines, draw_maps
from textenv.lm.model import LanguageModel
from textenv.prompts.prompts import as_prompt, by_position
from textenv.prompts.tokenize import prompt_ids, text_ids

MOST_PROBABLE, MOVED = 10, 5
"""Most probable tokens of each model that are listed; heads, and other parts, that moved most and are patched."""
ByModel = Mapping[str, np.ndarray]
"""A quantity of each model, ``[prompts, *]``; the first model is that before training."""


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

    Raises a ValueError if a text is not one token, or a model does not fit the others or `Blocks`.
    """
    prompts = by_position(prompts)
    blocks = {name: Blocks(lm) for name, lm in models.items()}
    if len(blocks) < 2 or len(tokens) != 2 or not prompts or neurons < 0:
        given = f"{len(blocks)} different models, {len(tokens)} tokens, {len(prompts)} prompts and {neurons} neurons"
        raise ValueError(f"{given}, expected at least 2 models, 2 tokens, at least 1 prompt and 0 neurons")
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
    values = {
        column: {name: x._asdict()[column].double().cpu().numpy() for name, x in found.items()}
        for column in Attribution._fields
    }
    title = f"Logit of {tokens[0]!r} minus that of {tokens[1]!r}"
    difference = compared("logit_difference", title, (), [()], values["difference"])
    places = [Place(layer, part) for part in PROJECTIONS for layer in range(len(base.blocks))]
    parts, heads = _part_changes(values["parts"], places), _heads(values["heads"])
    by_part = [place for row in parts.rows for place in places if str(place) == row[0]][:MOVED]
    by_head = [Place(layer, "attention", head) for layer, head, *_ in heads.rows if head != "bias"][:MOVED]
    runs = [*([place] for place in (*by_head, *by_part)), by_head]
    patched = patch(base, tuned, rows, pair, runs).double().cpu().numpy()
    patching = _patching([" + ".join(map(str, run)) for run in runs], patched, values["difference"])
    attention = _attention(blocks, rows[0], by_head)
    findings = [difference, _next_tokens(blocks, found), _lens(values["lens"]), parts, heads, patching, attention]
    return [*findings, _neurons(values["neurons"], neurons)] if neurons else findings


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
        spaced = f" {text}"
        other = f"{spaced!r} is one" if len(text_ids(spaced, tokenizer)) == 1 else "give its first, or another word"
        raise ValueError(f"{text!r} is {len(ids)} tokens ({split}), expected one: {other}")
    return ids


def _next_tokens(blocks: Mapping[str, Blocks], found: Mapping[str, Attribution]) -> Finding:
    def probabilities(name: str, chosen: Any = slice(None)) -> Iterator[Tensor]:  # a prompt at a time: they are large
        return (blocks[name].lm.logits(x[None])[0].softmax(-1)[chosen] for x in found[name].hidden)

    means = [sum(probabilities(name), torch.zeros(())) for name in blocks]
    most = [i for mean in means for i in mean.topk(min(MOST_PROBABLE, len(mean))).indices.tolist()]
    chosen = list(dict.fromkeys(most))
    values = {name: torch.stack([*probabilities(name, chosen)]).double().cpu().numpy() for name in blocks}
    tokenizer = next(iter(blocks.values())).lm.tokenizer
    labels = [(repr(tokenizer.decode([i])),) for i in chosen]
    title = "Probability of the next token: the most probable of each model"
    return compared("next_tokens", title, ("token",), labels, values)


def _lens(values: ByModel) -> Finding:
    panels = {"difference": {name: x.mean(0) for name, x in values.items()}}
    draw = partial(draw_lines, panels=panels, xlabel="layer")
    title = "Logit lens: the difference if the model ended after a layer (0: after the embedding)"
    labels = zip(range(change(values).shape[1]))
    return compared("logit_lens", title, ("layer",), labels, values, draw, ranked=False)


def _part_changes(values: ByModel, places: list[Place]) -> Finding:
    moved = change(values).mean(0)[:-2].reshape(len(PROJECTIONS), -1)
    lines = dict(zip(PROJECTIONS, moved, strict=True))
    draw = partial(draw_lines, panels={"change of direct contribution": lines}, xlabel="layer")
    labels = zip([*map(str, places), "embedding", "output's biases"])
    return compared("parts", "Direct contributions, which add up to the difference", ("part",), labels, values, draw)


def _heads(values: ByModel) -> Finding:
    moved = change(values).mean(0)
    layers, heads = map(range, moved.shape)
    rows = [{"change of direct contribution": moved[:, :-1]}]
    draw = partial(draw_maps, rows=rows, signed=True, xlabel="head", ylabel="layer")
    labels = itertools.product(layers, [*heads[:-1], "bias"])
    title = "Direct contributions of attention heads, and of the biases behind them"
    return compared("heads", title, ("layer", "head"), labels, values, draw)


def _neurons(values: ByModel, count: int) -> Finding:
    """The neurons that moved most."""
    moved = change(values).mean(0)
    layers, numbers = np.unravel_index(np.argsort(-abs(moved), axis=None, kind="stable")[:count], moved.shape)
    chosen = {name: x[:, layers, numbers] for name, x in values.items()}
    labels = zip(layers.tolist(), numbers.tolist(), strict=True)
    return compared("neurons", "Direct contributions of MLP neurons", ("layer", "neuron"), labels, chosen)


def _patching(names: list[str], patched: np.ndarray, difference: ByModel) -> Finding:
    rows: list[tuple[Any, ...]] = []
    before, after, *_ = difference.values()
    for name, x in zip(names, patched.T, strict=True):
        both = np.stack([after - x, after - before], 1)
        share = (_ratio(both), *(limits(both, _ratio) or ("", ""))) if both[:, 1].any() else ("", "", "")
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
    layers, _, numbers = map(list, zip(*heads, strict=True))
    values = {name: x.patterns(row)[layers, numbers][None].double().cpu().numpy() for name, x in blocks.items()}
    maps = {f"attention, {name}": x[0] for name, x in values.items()}
    named = [f"{head.layer}.{head.head}" for head in heads]
    axes: Any = {"xticks": range(len(row)), "xticklabels": tokens, "yticks": range(len(heads)), "yticklabels": named}
    labels = [(head, i, token) for head in named for i, token in enumerate(tokens)]
    title = "Attention from the first prompt's last position, of the heads (layer.head) that moved most"
    draw = partial(draw_maps, rows=[maps], **axes)
    return compared("attention", title, ("head", "position", "token"), labels, values, draw, ranked=False)
