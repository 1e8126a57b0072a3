"""What training changed in a language model: next tokens, logit differences, and the parts and heads behind them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from algos.lab.insight.attribution import Attribution, Place, attribute, patch
from algos.lab.insight.blocks import PROJECTIONS, Blocks
from algos.lab.insight.finding import Finding, change, compared, draw_lines, draw_maps
from algos.statistics.intervals import limits
from textenv.lm.model import LanguageModel
from textenv.prompts.prompts import as_prompt, by_position
from textenv.prompts.tokenize import prompt_ids, separate_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LISTED_TOKENS = 10
"""Most probable tokens of each model that are listed."""
PATCHED_PARTS = 5
"""Heads, and as many other parts, that are patched: those that moved most."""
ByModel = Mapping[str, np.ndarray]
"""A quantity of each model, ``[prompts, *]``; the first model is that before training."""


@torch.no_grad()
def interpret_language(
    models: Mapping[str, LanguageModel], prompts: Sequence[object], tokens: Sequence[str], *, neurons: int = 0
) -> list[Finding]:
    """Compare language models at the ends of prompts; changes are those from the first model to the second.

    Args:
        models: two or more models of one architecture and tokenizer, by their names in tables.
        prompts: texts, token ids or chats; from `MIN_SEEDS` on, changes have 95 % limits over the prompts.
        tokens: two tokens, or two sets with ``|`` between tokens, whose mean logits are subtracted.
        neurons: number of MLP neurons to list, those that moved most; memory then grows with the prompts.

    Raises a ValueError if a text is not one token, or a model does not fit the others or `Blocks`.
    """
    # Models
    prompts = by_position(prompts)
    blocks = {name: Blocks(lm) for name, lm in models.items()}
    if len(blocks) < 2 or len(tokens) != 2 or not prompts or neurons < 0:
        raise ValueError(
            f"{len(blocks)} different models, {len(tokens)} tokens, {len(prompts)} prompts and {neurons} neurons, "
            "expected at least 2 models, 2 tokens, at least 1 prompt and 0 neurons"
        )
    base, tuned, *_ = blocks.values()
    for name, x in blocks.items():
        if _architecture(x) != _architecture(base):
            raise ValueError(f"{name} has other layers, heads or tokens than {next(iter(blocks))}: expected the same")

    # Tokens and prompts
    tokenizer = base.lm.tokenizer
    pair = token_ids(tokens[0], tokenizer), token_ids(tokens[1], tokenizer)
    if set(pair[0]) & set(pair[1]):
        raise ValueError(f"{tokens[0]!r} and {tokens[1]!r} have a token in common, expected different ones")
    rows = [prompt_ids(as_prompt(i, prompt), tokenizer) for i, prompt in enumerate(prompts)]

    # Direct contributions
    attributions = {name: attribute(x, rows, pair, neurons=neurons > 0) for name, x in blocks.items()}
    difference = _by_model(attributions, "difference")
    components = [Place(layer, part) for part in PROJECTIONS for layer in range(len(base.blocks))]
    part_changes = _part_changes(_by_model(attributions, "parts"), components)
    head_changes = _heads(_by_model(attributions, "heads"))

    # Patching of what moved most: each component alone, then the heads together
    moved_parts = [x for row in part_changes.rows for x in components if str(x) == row[0]][:PATCHED_PARTS]
    rows_of_heads = [row for row in head_changes.rows if row[1] != "bias"][:PATCHED_PARTS]
    moved_heads = [Place(layer, "attention", head) for layer, head, *_ in rows_of_heads]
    runs = [[x] for x in (*moved_heads, *moved_parts)]
    runs.append(moved_heads)
    patched = patch(base, tuned, rows, pair, runs).double().cpu().numpy()
    run_names = [" + ".join(map(str, run)) for run in runs]

    title = f"Logit of {tokens[0]!r} minus that of {tokens[1]!r}"
    findings = [
        compared("logit_difference", title, (), [()], difference),
        _next_tokens(blocks, attributions),
        _lens(_by_model(attributions, "lens")),
        part_changes,
        head_changes,
        _patching(run_names, patched, difference),
        _attention(blocks, rows[0], moved_heads),
    ]
    if neurons:
        findings.append(_neurons(_by_model(attributions, "neurons"), neurons))
    return findings


def _architecture(blocks: Blocks) -> tuple[object, ...]:
    """What compared models must have in common."""
    return len(blocks.blocks), blocks.num_heads, blocks.lm.tokenizer.get_vocab()


def _by_model(attributions: Mapping[str, Attribution], field: str) -> ByModel:
    return {name: getattr(x, field).double().cpu().numpy() for name, x in attributions.items()}


def token_ids(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the ids of a token, or of several with ``|`` between; raises a ValueError if a text is no single token."""
    ids = separate_ids(text, tokenizer)
    reads_same = str(tokenizer.decode(ids)).strip() == text.strip()  # a word may be read as another one
    in_vocabulary = bool(ids) and reads_same
    if "|" in text and (len(ids) > 1 or not in_vocabulary):
        return [i for part in text.split("|") for i in token_ids(part, tokenizer)]
    if not in_vocabulary:
        raise ValueError(f"{text!r} is not in the tokenizer's vocabulary: give one of its tokens")
    if len(ids) > 1:
        pieces = ", ".join(repr(tokenizer.decode([i])) for i in ids)
        with_space = f" {text}"
        advice = "give its first, or another word"
        if len(separate_ids(with_space, tokenizer)) == 1:
            advice = f"{with_space!r} is one"
        raise ValueError(f"{text!r} is {len(ids)} tokens ({pieces}), expected one: {advice}")
    return ids


def _next_tokens(blocks: Mapping[str, Blocks], attributions: Mapping[str, Attribution]) -> Finding:
    """Probabilities of the tokens that some model finds most probable on average."""

    def probabilities(name: str) -> Iterator[Tensor]:
        """Yield those of one prompt at a time, as they are large: ``[vocabulary]``."""
        for hidden in attributions[name].hidden:
            yield blocks[name].lm.logits(hidden[None])[0].softmax(-1)

    # The tokens, without repetition; a sum has the same order as a mean
    token_set: dict[int, None] = {}
    for name in blocks:
        total = sum(probabilities(name), torch.zeros(()))
        most_probable = total.topk(min(LISTED_TOKENS, len(total))).indices
        token_set |= dict.fromkeys(most_probable.tolist())
    tokens = list(token_set)

    values = {}
    for name in blocks:
        of_tokens = [x[tokens] for x in probabilities(name)]
        values[name] = torch.stack(of_tokens).double().cpu().numpy()
    tokenizer = next(iter(blocks.values())).lm.tokenizer
    labels = [(repr(tokenizer.decode([i])),) for i in tokens]
    title = "Probability of the next token: the most probable of each model"
    return compared("next_tokens", title, ("token",), labels, values)


def _lens(values: ByModel) -> Finding:
    panels = {"difference": {name: x.mean(0) for name, x in values.items()}}
    draw = partial(draw_lines, panels=panels, xlabel="layer")
    title = "Logit lens: the difference if the model ended after a layer (0: after the embedding)"
    labels = zip(range(change(values).shape[1]))
    return compared("logit_lens", title, ("layer",), labels, values, draw, ranked=False)


def _part_changes(values: ByModel, components: list[Place]) -> Finding:
    # Without embedding and biases: [parts, layers]
    moved = change(values).mean(0)[:-2].reshape(len(PROJECTIONS), -1)
    lines = dict(zip(PROJECTIONS, moved, strict=True))
    draw = partial(draw_lines, panels={"change of direct contribution": lines}, xlabel="layer")
    labels = zip([*map(str, components), "embedding", "output's biases"])
    return compared("parts", "Direct contributions, which add up to the difference", ("part",), labels, values, draw)


def _heads(values: ByModel) -> Finding:
    moved = change(values).mean(0)  # [layers, heads + 1]
    num_layers, num_columns = moved.shape
    rows = [{"change of direct contribution": moved[:, :-1]}]
    draw = partial(draw_maps, rows=rows, signed=True, xlabel="head", ylabel="layer")
    labels = itertools.product(range(num_layers), [*range(num_columns - 1), "bias"])
    title = "Direct contributions of attention heads, and of the biases behind them"
    return compared("heads", title, ("layer", "head"), labels, values, draw)


def _neurons(values: ByModel, count: int) -> Finding:
    """The neurons that moved most."""
    moved = change(values).mean(0)  # [layers, neurons]
    ranking = np.argsort(-abs(moved), axis=None, kind="stable")
    layers, numbers = np.unravel_index(ranking[:count], moved.shape)
    chosen = {name: x[:, layers, numbers] for name, x in values.items()}
    labels = zip(layers.tolist(), numbers.tolist(), strict=True)
    return compared("neurons", "Direct contributions of MLP neurons", ("layer", "neuron"), labels, chosen)


def _patching(names: list[str], patched: np.ndarray, difference: ByModel) -> Finding:
    """Differences of the patched model, and the share of the training's change that the patch takes back."""
    first, second, *_ = difference.values()
    rows: list[tuple[object, ...]] = []
    for name, x in zip(names, patched.T, strict=True):
        changes = np.stack([second - x, second - first], 1)  # of the patch, and of the training
        share: object = ""
        low_and_high: tuple[object, object] = ("", "")
        if changes[:, 1].any():
            share = _ratio(changes)
            low_and_high = limits(changes, _ratio) or ("", "")
        rows.append((name, float(x.mean()), share, *low_and_high))
    title = "Activation patching: the difference with the first model's output at a place; share of the change gone"
    return Finding("patching", title, ("place", "difference", "share", "low", "high"), rows)


def _ratio(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """Ratio of the means of two columns."""
    means = x.mean(axis)
    return means[..., 0] / means[..., 1]


def _attention(blocks: Mapping[str, Blocks], row: Sequence[int], heads: list[Place]) -> Finding:
    # Patterns of these heads, [1, heads, length]
    layers = [head.layer for head in heads]
    numbers = [head.head for head in heads]
    values = {name: x.patterns(row)[layers, numbers][None].double().cpu().numpy() for name, x in blocks.items()}

    tokenizer = next(iter(blocks.values())).lm.tokenizer
    tokens = [ascii(tokenizer.decode([i])) for i in row]
    head_names = [f"{head.layer}.{head.head}" for head in heads]
    labels = [(name, i, token) for name in head_names for i, token in enumerate(tokens)]
    draw = partial(
        draw_maps,
        rows=[{f"attention, {name}": x[0] for name, x in values.items()}],
        xticks=range(len(row)),
        xticklabels=tokens,
        yticks=range(len(heads)),
        yticklabels=head_names,
    )
    title = "Attention from the first prompt's last position, of the heads (layer.head) that moved most"
    return compared("attention", title, ("head", "position", "token"), labels, values, draw, ranked=False)
