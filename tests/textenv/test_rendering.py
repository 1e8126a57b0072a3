"""Rendering: the text so far, chosen tokens shaded, nothing that commands the terminal."""

import re

import numpy as np
import pytest
import torch

from algos import LMPolicy, collect
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import EOS, GOOD, good, make_env
from textenv import TextEnv, render_rollout
from textenv.rendering import CAPTION_LINES, LINE_HEIGHT, WIDTH, caption, pieces, printable, sparkline

CODE = re.compile(r"\x1b\[[0-9;]*m")


def test_ansi_is_the_text_with_the_paid_token_shaded():
    env = make_env(good, 1, prompts=["a b"], render_mode="ansi", autoreset_mode="Disabled")
    env.reset(seed=0)
    assert env.render() == ("a b",)
    env.step(np.array([GOOD]))
    unscored = env.render()[0]
    env.step(np.array([EOS]))
    paid = env.render()[0]
    assert CODE.sub("", unscored) == "a b good" and CODE.sub("", paid) == "a b good <eos>"
    assert paid.startswith("a b\x1b[4;97;48;2;0;0;0m good\x1b[0m\x1b[4;97;48;2;0;200;0m <eos>")


def test_human_prints_at_reset_and_at_every_step(capsys):
    env = TextEnv(prompts=["a b"], reward=good, tokenizer=make_tokenizer(WORDS), render_mode="human")
    env.reset(seed=0)
    env.step(GOOD)
    assert env.render() is None
    shown = [CODE.sub("", line) for line in capsys.readouterr().out.splitlines()]
    assert shown == ["a b", "a b good", "a b good"]


def ink_of_lines(picture, height):
    """Fraction of pixels that are not white, of each line of the caption under a frame of this height."""
    rows = (picture[height:] != 255).any(axis=-1).mean(axis=1)
    return rows.reshape(CAPTION_LINES, LINE_HEIGHT).mean(axis=1)


def test_a_caption_stands_under_the_frame():
    frame = np.full((30, 50, 3), 7, np.uint8)
    picture = caption(frame, "one\ntwo", "left")
    assert picture.shape == (30 + CAPTION_LINES * LINE_HEIGHT, WIDTH, 3) and picture.dtype == np.uint8
    left = (WIDTH - 50) // 2
    assert (picture[:30, left : left + 50] == 7).all() and (picture[:30, :left] == 255).all()
    assert (ink_of_lines(picture, 30) > 0).tolist() == [True] * 3 + [False] * (CAPTION_LINES - 3)
    assert caption(np.zeros((8, 900, 3), np.uint8), "", "").shape[1] == 900
    assert not ink_of_lines(caption(frame, "", ""), 30).any()


def test_a_long_caption_keeps_its_end():
    frame = np.zeros((4, 4, 3), np.uint8)
    lines = [f"line {number}" for number in range(20)]
    last_lines = lines[1 - CAPTION_LINES :]
    picture = caption(frame, "\n".join(lines), "left")
    assert (picture == caption(frame, "\n".join(last_lines), "left")).all()
    assert (ink_of_lines(picture, 4) > 0).all()
    folded = caption(frame, "a word " * 40, "x" * 500)
    assert (ink_of_lines(folded, 4) > 0).sum() > 3
    assert (caption(frame, "\x1b[2J", "") == caption(frame, "\\x1b[2J", "")).all()


def test_a_rollout_is_shaded_by_any_column():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
    rollout = collect(make_env(), policy, num_episodes=4)
    shown = render_rollout(rollout, 1, policy.lm.tokenizer)
    mask = rollout["mask"][1]
    tokens = [*rollout["observation"][1, :1].tolist(), *rollout["action"][1].tolist()][
        : int(torch.nonzero(mask)[-1]) + 2
    ]
    assert CODE.sub("", shown) == policy.lm.tokenizer.decode(tokens)
    levels = [int(x) for x in re.findall(r"48;2;(\d+);0;0m", shown)]
    assert len(levels) == int(mask.sum()) and max(levels) == 200
    darkest = int(rollout["log_prob"][1][mask].abs().argmin())
    assert levels[darkest] == min(levels)
    with pytest.raises(KeyError, match="it has action"):
        render_rollout(rollout, 1, policy.lm.tokenizer, column="luck")


def test_a_character_stands_at_its_last_token():
    from textenv.lm.loading import load_tokenizer

    tokenizer = load_tokenizer()
    ids = tokenizer("a é🎬b")["input_ids"]
    found = pieces(ids, tokenizer)
    assert "".join(found) == tokenizer.decode(ids) and len(found) == len(ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found)


def test_answers_cannot_command_the_terminal():
    assert printable("\x1b[2Jhi\u202etxt\x07\n") == "\\x1b[2Jhi\\u202etxt\\x07\n"


def test_a_sparkline_has_the_shape_of_its_curve():
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 8) == "▁▁▁" and sparkline([], 8) == ""
    assert sparkline([0] * 500 + [1] * 500, 10) == "▁▁▁▁▁█████"
    assert sparkline([1, float("nan"), float("inf"), 2], 4) == "▁  █" and sparkline([float("nan")] * 3, 2) == "  "
    assert sparkline([1, float("nan"), 3, 3], 2) == "▁█", "a value that is not finite is left out of its group"
