"""The readers of outside data, each given many inputs: what cannot be read is refused in words, and nothing hangs.

    python tests/fuzz/fuzzing.py --inputs 100000
    python tests/fuzz/fuzzing.py --inputs 2000 --targets scores prompts

`tests/fuzz/fuzz_inputs.py` draws the inputs; `tests/fuzz/test_fuzz.py` runs a few hundred for each target.
"""

import argparse
import atexit
import functools
import hashlib
import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from array import array
from collections import OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch

from algos import PPO, MLPPolicy, PPOConfig
from algos.cli.arguments import json_object, with_files
from algos.config import CONFIGS
from algos.make import make_policy, make_vector_environment, remake_environment
from algos.policies.policy import WEIGHTS
from algos.storage.checkpoint import read_checkpoint
from algos.storage.run_files import MANIFEST, STATE, TENSORS
from algos.training.run import Run
from algos.training.save import load, read_description
from tests.fuzz.fuzz_inputs import KEYS, LEAVES, TARGETS, anything, changed, edited, fuzz, target, text_of
from tests.helpers.models import WORDS, make_tokenizer
from textenv import load_prompts, split_prompts
from textenv.envs.action_masks import ActionMasks
from textenv.envs.turn import Turn
from textenv.extras.human.feedback_file import FeedbackFile, scores
from textenv.extras.safe_eval import FUNCTIONS, is_harmless
from textenv.games import Calculator
from textenv.prompts.prompts import Prompt, PromptList, as_prompt
from textenv.prompts.tokenize import prompt_ids
from textenv.rewards.answer import answer_text
from textenv.rewards.numeric import as_fraction, number_of, numeric_answer
from textenv.rewards.scores import Rows, Scores, read_scores


@functools.cache
def scratch():
    """A folder in memory, where there is one, until the end of the process."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzzing-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def lines_of(records, dice):
    """A file of these records, or of such as were made from them."""
    if dice.below(2):
        found = changed(json.loads(json.dumps(records)), dice)
        records = found if isinstance(found, list) else [found]
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


# --- prompts ---------------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a b"}]
RECORDS = [{"prompt": "a b", "answer": "1"}, {"prompt": [0, 1], "answer": 2}, {"prompt": CHAT, "answer": None}]
CSV = b'prompt,answer\n"a, ""b""",1\n"two\nlines",2\n\nc,3\n'


@functools.cache
def tokenizer():
    found = make_tokenizer(WORDS)
    found.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}."
    return found


@target(says=r"prompts\.|prompt [\d'\"({\[]|prompts is in split|'role'|refused")
def prompts(dice):
    """Files of prompts: JSON lines, CSV, TSV."""
    kind = dice.of(["jsonl", "csv", "tsv"])
    content = {"jsonl": lines_of(RECORDS, dice), "csv": CSV, "tsv": CSV.replace(b",", b"\t")}[kind]
    path = scratch() / f"prompts.{kind}"
    path.write_bytes(edited(content, dice))
    records = load_prompts(path, prompt_column=dice.of(["prompt", "prompt", "prompt", "answer", "\ud800"]))
    deck = PromptList(records)
    for index in range(len(records)):
        prompt_ids(deck.prompt(index), tokenizer())
    split_prompts(records, "train")


@target(says=r"prompts\.parquet")
def parquet(dice):
    """Parquet files of prompts, which `datasets` reads: slow, so give it fewer."""
    path = scratch() / "prompts.parquet"
    path.write_bytes(edited(parquet_bytes(), dice))
    list(load_prompts(path))


@functools.cache
def parquet_bytes():
    import datasets

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = scratch() / "cache"
    path = scratch() / "real.parquet"
    datasets.Dataset.from_list([{"prompt": "a b", "answer": 1}, {"prompt": "c", "answer": 2}]).to_parquet(str(path))
    return path.read_bytes()


@target(says="prompt")
def prompt_objects(dice):
    """Prompts as Python objects."""
    prompt_ids(as_prompt(3, python_object(dice)), tokenizer())


# --- rewards ---------------------------------------------------------------------------------------------------------

OBJECTS = [
    lambda: np.arange(2), lambda: np.ones((2, 2)), lambda: np.float16(1), lambda: np.array(3.0),
    lambda: np.array(["a", "b"]), lambda: np.array([1, None], dtype=object), lambda: np.array([1 + 2j, 3]),
    lambda: np.datetime64("2020-01-01"), lambda: np.array([np.nan, 1]),
    lambda: np.ma.masked_array([1.0, 2.0], [True, False]), lambda: np.zeros(0),
    lambda: np.array([(1, 2.0), (3, 4.0)], dtype="i4,f4"), lambda: np.array([2**64 - 1, 1], dtype=np.uint64),
    lambda: np.array([1e300, 1.0]), lambda: np.longdouble("1e4000"), lambda: torch.arange(2),
    lambda: torch.ones(2, 2), lambda: torch.tensor(1.0, requires_grad=True), lambda: torch.tensor([True, False]),
    lambda: torch.tensor([1j, 2.0]), lambda: torch.ones(2, dtype=torch.bfloat16),
    lambda: torch.ones(2, device="meta"), lambda: torch.tensor(3.0, device="meta"),
    lambda: torch.ones(2, 2).to_sparse(), lambda: torch.ones(2, dtype=torch.float8_e5m2), lambda: torch.zeros(0),
    lambda: torch.tensor([2**62, 1]), lambda: torch.full((2,), torch.nan), lambda: (x for x in (1.0, 2.0)),
    lambda: iter([1.0, 2.0]), lambda: {1.0, 2.0}, lambda: b"ab", lambda: bytearray(b"ab"), lambda: memoryview(b"ab"),
    lambda: range(2), lambda: "ab", lambda: 1 + 2j, lambda: object(), lambda: int, lambda: len,
    lambda: Fraction(1, 3), lambda: Decimal("sNaN"), lambda: Decimal("1e999"), lambda: OrderedDict(a=1),
    lambda: {}.keys(), lambda: {"a": 1.0}.values(), lambda: recursive(), lambda: deep(), lambda: (1.0, 2.0),
    lambda: Scores(score=[1.0, None]), lambda: Scores(score=[1.0]), lambda: Scores(score=None),
    lambda: {1: 2.0, None: 3.0}, lambda: {(1,): [1.0, 2.0]}, lambda: [np.float32(1), torch.tensor(2)],
    lambda: [[1.0, 2.0], [3.0, 4.0]], lambda: [[1.0], [np.nan]], lambda: ...,
    lambda: [{"a": 1.0}, {"a": [1.0, 2.0], "b": None}], lambda: {"a": [1.0, 2.0], "b": [None, 3]}, lambda: slice(2),
    lambda: [None, True], lambda: deque([1, 2]), lambda: array("d", [1, 2]), lambda: SimpleNamespace(role="a"),
]  # fmt: skip
"""Made afresh each time: some are used up by reading."""


def recursive():
    found = [1.0]
    found.append(found)
    return found


def deep():
    found = [1.0]
    for _ in range(500):
        found = [found]
    return found


def python_object(dice, depth=2):
    """A Python object, of JSON's kinds or another."""
    kind = dice.below(5) if depth else 3
    if kind == 0:
        return dice.of([list, tuple])(python_object(dice, depth - 1) for _ in range(dice.of([2, 2, 0, 1, 3])))
    if kind == 1:
        return {dice.of([*KEYS, 1, None, (2,)]): python_object(dice, depth - 1) for _ in range(dice.below(3))}
    return dice.of(OBJECTS)() if kind == 2 else anything(dice, depth)


@target(says="reward 'f")
def score_objects(dice):
    """What a reward function returned, for two answers."""
    rows = Rows({"prompts": ["p", "q"], "completions": ["a", "b"], "completion_ids": [[1, 2], [3]]})
    found = read_scores(python_object(dice), rows, name="f", finite=dice.below(4) > 0)
    assert len(found.score) == 2 and all(len(column) == 2 for column in found.parts.values())
    for earned, tokens in zip(found.score, (2, 1), strict=True):
        assert earned is None or isinstance(earned, float) or (earned.dtype, earned.shape) == (np.float32, (tokens,))


NUMBERS = [
    "1", "23", "0", "007", ",", ".", "e5", "E-9", "e999999999", "-", "+", "\N{MINUS SIGN}", "/", " / ", "%", "\\%",
    "$", "€", "####", "#", " ", "\t", "\n", "\\boxed{", "\\boxed", "{", "}", "\\frac{1}{2}", "\\frac", "\\dfrac{",
    "\\,", "{,}", "x", "_", "^", "²", "٣", "\ud800", "\0", "1,234", "(", ")", "]", "9" * 500, "1/0", "-.5", "yes",
]  # fmt: skip


@target(says="")
def answers(dice):
    """Texts of answers, from which numbers are read."""
    text = text_of(dice, NUMBERS)
    number_of(text), as_fraction(text)
    numeric_answer()(completions=[text], answer=[dice.of([text, *LEAVES])])


@target(says="answer|completion")
def completions(dice):
    """An answer as a reward function is given it: a text or messages."""
    given = dice.of([anything, python_object])(dice)
    if dice.below(2):
        given = [{"role": "assistant", "content": given}]
    assert isinstance(answer_text(given), str)


PYTHON = [
    "1", "x", "(", ")", "[", "]", ",", "+", "-", "*", "**", "/", " ", "\n", "'a'", "\"", "__", "lambda", ":", "sqrt",
    "exp(", ".", "9", "0x", "1e9", "if", "for", "in", "{", "}", "=", "!", "\0", "\ud800", "ſ", "not", "~", "@", "f'{",
    "#", "\\", "import",
]  # fmt: skip


@target(says="")
def python_texts(dice):
    """Texts that may be handed to ``eval``, and the calculator's commands."""
    text = text_of(dice, PYTHON)
    is_harmless(text, sympy=dice.below(2) > 0, functions=dice.of([(), FUNCTIONS]))
    env = Calculator()
    env.reset(seed=0)
    assert isinstance(env.step(f"calc: {text}")[0], str)


# --- action masks ----------------------------------------------------------------------------------------------------


@target(says="^allowed returned")
def rules(dice):
    """What a rule of constrained decoding returned."""
    turn = Turn(Prompt("a"), [0], [0], [1], False, tokenizer())
    given = python_object(dice)
    masks = ActionMasks(len(WORDS), forbidden=[8], ends=[7], min_new_tokens=1, rule=lambda turn: given)
    chosen = masks.index(lambda i: turn, np.array([0, 3]))
    assert masks.sets[chosen].any(-1).all()


@target(says="^action")
def actions(dice):
    """What an agent gave to ``step``."""
    masks = ActionMasks(len(WORDS), forbidden=[8], ends=[7])
    masks.check(python_object(dice), np.array([0, 1]), np.array([1, 1]))


# --- a person's answers ----------------------------------------------------------------------------------------------

ANSWERED = [
    {"prompt": "p", "completion": "c", "score": 1.0, "answer": "up", "scale": "thumbs", "time": "t", "annotator": "me"},
    {
        "prompt": CHAT,
        "completion": CHAT[1:],
        "score": 0.4,
        "answer": "2",
        "scale": "0-5",
        "time": "t",
        "annotator": "me",
    },
    {"prompt": "p", "chosen": "c", "rejected": "d", "completions": ["c", "d"], "answer": "first", "scale": "pairs"},
]


@target(says=r"feedback\.jsonl")
def feedback(dice):
    """Files of what people answered."""
    path = scratch() / "feedback.jsonl"
    path.write_bytes(edited(lines_of(ANSWERED, dice), dice))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ended with an incomplete line")
        file = FeedbackFile(path)
    for record in file.answers().values():
        scores(record)
    if dice.below(8) == 1:
        file.scored(), file.preferences()


# --- what a training wrote -------------------------------------------------------------------------------------------


@target(says=r"Config|steps is|TRPO")
def configs(dice):
    """Hyper-parameters as JSON."""
    made = CONFIGS[dice.of(sorted(CONFIGS))]
    arguments = {}
    for _ in range(dice.below(3) + 1):
        value = anything(dice, 1)
        arguments[dice.of([*sorted(made.__dataclass_fields__), *KEYS])] = value
    made(**arguments)


@functools.cache
def cartpole():
    return make_vector_environment("CartPole-v1", 1, seed_each=True)


POLICIES = {
    "auto": ["hidden", "normalize_observations", "log_std_init"],
    "lstm": ["hidden", "lstm_hidden", "normalize_observations"],
    "q": ["hidden"],
    "cnn": ["hidden"],
}


@target(says=".")
def options(dice):
    """The options of the command line that are JSON objects."""
    policy = dice.of(sorted(POLICIES))
    tree = {dice.of([*POLICIES[policy], *KEYS]): anything(dice, 1) for _ in range(dice.below(3))}
    text = edited(json.dumps(tree).encode(), dice).decode("utf-8", "surrogateescape")
    arguments = json_object(text, "--policy-kwargs")
    make_policy(cartpole(), policy=policy, **_small(arguments))


def _small(value):
    """Without numbers of millions: what cannot be allocated is the machine's to refuse."""
    if isinstance(value, dict):
        return {name: _small(x) for name, x in value.items() if name not in ("seed", "policy")}
    if isinstance(value, list):
        return [_small(x) for x in value]
    return 3 if isinstance(value, int) and abs(value) > 1000 else value


@target(says=".")
def env_options(dice):
    """``--env-kwargs``."""
    tree = {dice.of(["max_episode_steps", "render_mode", "sutton_barto_reward", *KEYS]): anything(dice, 1)}
    arguments = json_object(json.dumps(tree), "--env-kwargs")
    make_vector_environment(dice.of(["CartPole-v1", "textenv/Nothing-v0"]), 1, **arguments).close()


@functools.cache
def trained():
    """A short run's folder: agent, metrics, a checkpoint."""
    folder = scratch() / "run"
    agent().learn(64, run_dir=folder, checkpoint_every=64, progress=False)
    options = {"env": "CartPole-v1", "total_steps": 64, "config": {"num_steps": 16}, "env_kwargs": {}}
    (folder / "run.yaml").write_text(json.dumps(options))  # JSON is YAML
    return folder


def agent():
    """A new one each time: to deepcopy a `torch.Generator` loses a reference to None, of which the process dies."""
    env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(4,))
    return PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=32, num_epochs=1))


@functools.cache
def written(name):
    """A file of the run; of those in checkpoints that of the last."""
    path = trained() / name
    if not path.is_file():
        path = max(trained().glob(f"**/{name}"))
    return path.read_bytes()


def damaged(name, dice):
    """A file of the run: its JSON changed, or its bytes."""
    data = written(name)
    if name.endswith((".json", ".yaml")) and dice.below(2):
        return json.dumps(changed(json.loads(data), dice)).encode()
    return edited(data, dice)


@target(says=r"config\.json|policy|holds a")
def saved_agents(dice):
    """Folders of saved agents: their description, then their weights."""
    folder = scratch() / "agent"
    (folder / "policy").mkdir(parents=True, exist_ok=True)
    which = dice.below(2)
    (folder / "config.json").write_bytes(damaged("config.json", dice) if which else written("config.json"))
    weights = written(WEIGHTS)
    (folder / "policy" / WEIGHTS).write_bytes(weights if which else edited(weights, dice))
    load(folder)


@target(says=".")
def saved_environments(dice):
    """The environment that a saved agent was trained on, made again."""
    folder = scratch() / "agent"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(damaged("config.json", dice))
    remake_environment(read_description(folder), num_envs=1).close()


@target(says="checkpoint|step-|a run of")
def checkpoints(dice):
    """Checkpoints: damaged by accident, or made to look whole."""
    read_checkpoint(damaged_checkpoint(dice))


@target(says="checkpoint|step-|a run of")
def resumed(dice):
    """Such checkpoints, where they can be read, gone on from."""
    Run(agent()).restore(damaged_checkpoint(dice))


def damaged_checkpoint(dice):
    folder = scratch() / "other" / "checkpoints" / "step-000000000064"
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent.parent / "metrics.jsonl").write_bytes(edited(written("metrics.jsonl"), dice))
    which = dice.of([STATE, STATE, TENSORS, MANIFEST])
    files = {name: damaged(name, dice) if name == which else written(name) for name in (STATE, TENSORS, MANIFEST)}
    if which != MANIFEST and dice.below(4):
        sums = {name: hashlib.sha256(files[name]).hexdigest() for name in (STATE, TENSORS)}
        files[MANIFEST] = json.dumps(json.loads(files[MANIFEST]) | {"files": sums}).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@target(says=r"run\.yaml|no checkpoint")
def run_folders(dice):
    """What else a run that goes on reads: by what it was started. (What is wrong with its metrics does not matter.)"""
    folder = scratch() / "third"
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_bytes(damaged("run.yaml", dice))
    found = with_files(["train", "--resume", str(folder)], {"json"})
    assert all(isinstance(word, str) for word in found)


def main():
    """Run the targets named, or all of them, and print what came of it."""
    parser = argparse.ArgumentParser(description="Give every reader of outside data so many inputs.")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--targets", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    chosen = parser.parse_args()
    warnings.simplefilter("error")
    print(f"{'target':<15}{'inputs':>8}{'read':>8}{'seconds':>9}  refused", flush=True)
    broken = 0
    for name in chosen.targets:
        began = time.perf_counter()
        try:
            tally = fuzz(name, chosen.inputs)
        except (
            Exception
        ) as error:  # an `ExceptionGroup` where there are several; the next target has its turn all the same
            broken += 1
            print(f"{name:<15}FAILED  {error!r}\n    {getattr(error, '__notes__', [])}", flush=True)
            continue
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.errors.items()))
        seconds = time.perf_counter() - began
        print(f"{name:<15}{tally.inputs:>8}{tally.read:>8}{seconds:>9.0f}  {told}", flush=True)
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
