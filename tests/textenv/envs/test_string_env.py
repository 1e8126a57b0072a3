"""A `LanguageWrapper` played token by token: its words, its instructions, and what the environment inside it pays."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from algos import LMPolicy, collect
from tests.helpers.chat_families import CHATML, MISTRAL, byte_tokenizer
from tests.helpers.conversations import Parrot
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import TokenVectorEnv, check_text_env
from textenv.envs.string_env import StringGames, TokenEnv
from textenv.lm.loading import load_tokenizer
from textenv.prompts.tokenize import separate_ids
from textenv.words.wrapper import LanguageWrapper

CONTINUED = ["go", "go left", "left", "up", "upward"]
"""Words of which two continue others."""


class Recorder(gymnasium.Env):
    """Observes how many actions it got, in all its episodes; an episode ends after ``steps``."""

    observation_space = spaces.Discrete(1000)

    def __init__(self, num_actions=5, steps=1000):
        self.action_space = spaces.Discrete(num_actions)
        self.steps = steps
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = len(self.actions)
        return 0, {}

    def step(self, action):
        self.actions.append(int(action))
        count = len(self.actions) - self.start
        return count, 1.0, count == self.steps, False, {}


def describe(observation):
    return f"x {observation}"


def metaspace_tokenizer():
    """A tokenizer that puts a space before the first word of a text, as those of SentencePiece do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<unk>", "<eos>", "▁", "\n", *"abcdefghijklmnopqrstuvwxyz0123456789.,"]
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


def words_tokenizer(*, template=None):
    names = ["<unk>", "x", *map(str, range(10)), *["go", "left", "up", "upward", "right"], "<eos>", "<pad>"]
    tokenizer = make_tokenizer(names)
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {
    "embedded": lambda: load_tokenizer("embedded"),
    "bytes": byte_tokenizer,
    "metaspace": metaspace_tokenizer,
    "words": words_tokenizer,
    "chat": lambda: byte_tokenizer(["<|im_start|>", "<|im_end|>"], template=CHATML, eos="<|im_end|>"),
}
"""Functions that make tokenizers of several kinds."""


def make_env(tokenizer, words=CONTINUED, inner=None, **options):
    inner = inner or Recorder(len(words))
    env = LanguageWrapper(inner, describe, words, options.pop("instructions", ""))
    arguments = dict(max_prompt_tokens=80, max_length=200)
    return TokenEnv(env, tokenizer=tokenizer, **(arguments | options)), inner


def make_policy(tokenizer, seed=0):
    """A random GPT-2 with the tokenizer's EOS."""
    ids = dict(bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=None)
    return LMPolicy(make_gpt2(len(tokenizer), n_positions=512, **ids), tokenizer, seed=seed)


def written(env, row):
    """What the policy wrote in an episode, turn by turn."""
    return [turn["content"].strip() for turn in env.samples([row])[0]["turns"] if turn["role"] == "assistant"]


def state(observation):
    return observation["tokens"][: int(observation["length"][0])].tolist()


# --- words as tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_masks_allow_exactly_the_words(name):
    """All sequences of allowed tokens, enumerated: each is a word, with EOS if another word continues it."""
    tokenizer = TOKENIZERS[name]()
    env, inner = make_env(tokenizer)
    action_of_ids = {}
    open_prefixes = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        _, info = env.reset(seed=0)
        inner.actions.clear()
        for token in prefix:
            _, _, _, _, info = env.step(token)
        if inner.actions:
            action_of_ids[prefix] = inner.actions[0]
            continue
        open_prefixes += [(*prefix, int(token)) for token in np.flatnonzero(info["action_mask"])]

    end = (tokenizer.eos_token_id,)
    expected = {}
    for action, word in enumerate(CONTINUED):
        is_continued = any(other != word and ids_begin(other, word, tokenizer) for other in CONTINUED)
        expected[(*separate_ids(word, tokenizer), *(end if is_continued else ()))] = action
    assert action_of_ids == expected


def ids_begin(text, beginning, tokenizer):
    ids = separate_ids(beginning, tokenizer)
    return separate_ids(text, tokenizer)[: len(ids)] == ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_word_ends_its_turn_without_a_further_token(name):
    tokenizer = TOKENIZERS[name]()
    env, inner = make_env(tokenizer, ["go left", "right", "up"])
    observation, _ = env.reset(seed=0)
    for action, word in enumerate(["go left", "right", "up"]):
        ids_before = state(observation)
        for token in separate_ids(word, tokenizer):
            assert len(inner.actions) == action
            observation, *_ = env.step(token)
        assert inner.actions == list(range(action + 1))
        ids = [*ids_before, *separate_ids(word, tokenizer)]
        assert state(observation)[: len(ids)] == ids
        assert len(state(observation)) > len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_checker_of_text_environments_passes(name):
    env, _ = make_env(TOKENIZERS[name](), inner=Recorder(5, steps=4))
    check_text_env(env)


def test_no_word_is_cut_by_the_length_of_an_episode():
    """The episode is truncated instead, as soon as the longest word does not fit."""
    tokenizer = byte_tokenizer()
    lengths = set()
    for max_length in range(20, 40):
        env, inner = make_env(tokenizer, ["up", "downward"], max_prompt_tokens=8, max_length=max_length)
        observation, _ = env.reset(seed=0)
        truncated = False
        while not truncated:
            for token in separate_ids("up", tokenizer):
                observation, _, _, truncated, _ = env.step(token)
        assert set(inner.actions) == {0}
        room = max_length - len(state(observation))
        assert room < len("\nx 9\n") + len("downward")
        lengths.add(room)
    assert len(lengths) > 3


def test_the_turn_limit_follows_from_the_longest_word():
    tokenizer = byte_tokenizer()
    for options in ({}, {"max_new_tokens": len("go left")}):
        env, inner = make_env(tokenizer, max_length=None, max_turns=1, **options)
        observation, _ = env.reset(seed=0)
        assert observation["tokens"].shape == (80 + len("go left"),)
        for token in separate_ids("go left", tokenizer):
            env.step(token)
        assert inner.actions == [CONTINUED.index("go left")]
    with refused(ValueError, "max_new_tokens is 6", "at least 7, the tokens of the longest word"):
        make_env(tokenizer, max_new_tokens=6)
    with refused(ValueError, "max_length is 10", "max_prompt_tokens, 8", "longest text in allowed, 7"):
        make_env(tokenizer, max_prompt_tokens=8, max_length=10)


def test_words_with_the_same_tokens_are_refused():
    from tokenizers import normalizers

    tokenizer = words_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with refused(ValueError, "'left' and 'LEFT'|'LEFT'", "same tokens"):
        make_env(tokenizer, ["left", "LEFT"])


def test_words_that_the_tokenizer_cannot_write_are_refused():
    with refused(ValueError, "sideways", "<unk>|''", "no model can write it"):
        make_env(words_tokenizer(), ["left", "sideways"])


def test_a_word_that_another_continues_needs_an_end():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with refused(ValueError, "'go'", "no EOS"):
        make_env(tokenizer, ["go", "go left"])


def test_allowed_replaces_the_words():
    tokenizer = words_tokenizer()
    env, _ = make_env(tokenizer, ["left", "right"], allowed=["left"], max_new_tokens=2)
    _, info = env.reset(seed=0)
    assert np.flatnonzero(info["action_mask"]).tolist() == separate_ids("left", tokenizer)


def test_a_list_of_words_serves_any_string_environment():
    tokenizer = make_tokenizer(WORDS)
    env = TokenVectorEnv(Parrot, tokenizer=tokenizer, max_prompt_tokens=4, max_length=40, allowed=["good", "bad"])
    rollout = collect(env, make_policy(tokenizer), num_episodes=6, seed=1)
    heard = [word for row in range(6) for word in written(env, row)]
    assert {*heard} == {"good", "bad"}
    assert rollout["reward"].sum() == heard.count("good")


@pytest.mark.parametrize("max_length", range(16, 28))
def test_no_text_of_a_list_is_cut_by_the_length_of_an_episode(max_length):
    tokenizer = byte_tokenizer()
    games = []
    env = TokenVectorEnv(
        lambda: games.append(Parrot()) or games[-1], tokenizer=tokenizer, num_envs=2,
        max_prompt_tokens=8, max_new_tokens=8, max_length=max_length, allowed=["good", "very bad"],
    )  # fmt: skip
    policy = LMPolicy(make_gpt2(len(tokenizer), n_positions=64), tokenizer, seed=1)
    rollout = collect(env, policy, num_episodes=8, seed=max_length)
    assert {word for game in games for word in game.heard} <= {"good", "very bad"}
    assert rollout["truncated"].any() and max(len(game.heard) for game in games) < 3


def test_a_context_too_short_for_a_text_of_a_list_is_refused():
    options = {"tokenizer": byte_tokenizer(), "max_prompt_tokens": 8, "max_new_tokens": 8, "max_length": 15}
    with refused(ValueError, "max_length is 15", "longest text in allowed, 8"):
        TokenVectorEnv(Parrot, allowed=["good", "very bad"], **options)


# --- instructions, and the chat template ------------------------------------------------------------------------


def first_text(template, **options):
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], template=template, bos="<bos>", eos="<|im_end|>")
    env, _ = make_env(tokenizer, ["left", "right"], **options)
    return tokenizer.decode(state(env.reset(seed=0)[0]))


def test_instructions_come_first():
    assert first_text(None, instructions="Go.") == "Go.\nx 0\n"
    assert first_text(None, instructions="") == "x 0\n"


def test_instructions_are_a_system_message_if_there_is_one():
    text = first_text(CHATML, instructions="Go.")
    expected = "<|im_start|>system\nGo.<|im_end|>\n<|im_start|>user\nx 0<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected
    assert "system" not in first_text(CHATML, instructions="")


def test_a_template_is_asked_once_for_system_messages():
    tokenizer = TOKENIZERS["chat"]()
    rendered = []
    apply_chat_template = tokenizer.apply_chat_template

    def counted(*args, **options):
        rendered.append(args)
        return apply_chat_template(*args, **options)

    tokenizer.apply_chat_template = counted
    games = StringGames(lambda: LanguageWrapper(Recorder(), describe, instructions="Go."), tokenizer=tokenizer)
    prompts = games.sample_prompts([0, 1, 2], seed=0)
    assert [prompt.messages[0]["role"] for prompt in prompts] == ["system"] * 3
    assert len(rendered) == 1


def test_a_template_without_system_messages_has_them_in_the_first():
    assert first_text(MISTRAL, instructions="Go.") == "<bos>[INST] Go.\nx 0[/INST]"


def test_the_chat_template_can_be_left_off():
    assert first_text(CHATML, instructions="Go.", chat=False) == "Go.\nx 0\n"


def test_a_chat_goes_on_as_its_template_writes_it():
    tokenizer = TOKENIZERS["chat"]()
    env, _ = make_env(tokenizer, ["left", "right"], instructions="Go.")
    observation, _ = env.reset(seed=0)
    for word in ("left", "right"):
        for token in separate_ids(word, tokenizer):
            observation, *_ = env.step(token)
    messages = [
        {"role": "system", "content": "Go."},
        {"role": "user", "content": "x 0"},
        {"role": "assistant", "content": "left"},
        {"role": "user", "content": "x 1"},
        {"role": "assistant", "content": "right"},
        {"role": "user", "content": "x 2"},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(state(observation)) == expected


# --- episodes ---------------------------------------------------------------------------------------------------


LAKE_WORDS = ["left", "down", "right", "up"]


def lake_of_numbers():
    """A slippery lake in which each kind of step has a reward of its own."""
    return gymnasium.make("FrozenLake-v1", max_episode_steps=12, success_rate=0.7, reward_schedule=(4, -2, -1))


def frozen_lake():
    return LanguageWrapper(lake_of_numbers(), describe, LAKE_WORDS, "")


@pytest.mark.heavy
def test_an_episode_is_that_of_the_environment_inside():
    """Rewards and ends, against the environment stepped by numbers with the seed of the episode."""
    tokenizer = words_tokenizer_with("down")
    env = TokenVectorEnv(frozen_lake, tokenizer=tokenizer, num_envs=3, max_turns=50, max_prompt_tokens=8)
    policy = make_policy(tokenizer)
    rollout = collect(env, policy, num_episodes=24, seed=5)
    numbers_env = lake_of_numbers()
    order_seed = env.prompt_order["seed"]
    outcomes = set()
    for row in range(24):
        number = int(rollout["group"][row, 0])
        numbers_env.reset(seed=int(np.random.default_rng([order_seed, number]).integers(2**31)))
        rewards = []
        for word in written(env, row):
            _, reward, terminated, truncated, _ = numbers_env.step(LAKE_WORDS.index(word))
            truncated = truncated and not terminated
            rewards.append(reward)
        assert rollout["reward"][row][rollout["mask"][row]].tolist() == rewards
        assert (rollout["terminated"][row].any(), rollout["truncated"][row].any()) == (terminated, truncated)
        outcomes.add((terminated, truncated))
    assert outcomes == {(True, False), (False, True)}


def words_tokenizer_with(*words):
    return make_tokenizer(["<unk>", "x", *map(str, range(16)), "left", "right", "up", *words, "<eos>", "<pad>"])


@pytest.mark.heavy
def test_equal_seeds_give_equal_transcripts():
    tokenizer = words_tokenizer_with("down")
    rollouts = []
    for _ in range(2):
        env = TokenVectorEnv(frozen_lake, tokenizer=tokenizer, num_envs=3, max_turns=50, max_prompt_tokens=8)
        rollouts.append(collect(env, make_policy(tokenizer), num_episodes=9, seed=5))
    for name in ("observation", "action", "reward", "truncated", "mask", "log_prob"):
        assert torch.equal(rollouts[0][name], rollouts[1][name]), name


@pytest.mark.heavy
def test_unreadable_turns_are_counted_in_the_metrics():
    def make():
        return LanguageWrapper(Recorder(2, steps=3), describe, "free")

    tokenizer = words_tokenizer()
    env = TokenVectorEnv(make, tokenizer=tokenizer, max_turns=6, max_prompt_tokens=20, max_new_tokens=2, max_length=200)
    policy = make_policy(tokenizer)
    rollout = collect(env, policy, num_episodes=16, seed=1)
    turns = [text for row in range(16) for text in written(env, row)]
    unreadable = [not {"0", "1"} & {*turn.split()} for turn in turns]
    assert 0 < np.mean(unreadable) < 1
    assert env.metrics["reward/log/unreadable"] == pytest.approx(np.mean(unreadable))
    assert rollout["reward"].sum() == len(turns) - sum(unreadable)


def test_no_environment_is_made_in_vain():
    """The one that the constructor looks at is that of the first episode; a later one is closed with the games."""
    made = []

    class Closing(Recorder):
        closed = False

        def close(self):
            self.closed = True

    def make():
        made.append(Closing(2, steps=1))
        return LanguageWrapper(made[-1], describe, ["left", "up"])

    tokenizer = words_tokenizer()
    env = TokenVectorEnv(make, tokenizer=tokenizer, num_envs=2, max_prompt_tokens=20)
    assert len(made) == 1
    env.reset(seed=0)
    assert len(made) == 2
    TokenVectorEnv(make, tokenizer=tokenizer, max_prompt_tokens=20).close()
    assert [inner.closed for inner in made] == [False, False, True]


def test_an_environment_without_words_stays_as_it_was():
    games = StringGames(Parrot, tokenizer=make_tokenizer(WORDS))
    env = TokenVectorEnv(Parrot, tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4)
    assert isinstance(games.look_at_env(), Parrot)
    assert env.action_mask is None


def test_the_policy_scores_what_it_sampled():
    tokenizer = byte_tokenizer()

    def make():
        return LanguageWrapper(Recorder(5, steps=3), describe, CONTINUED)

    env = TokenVectorEnv(make, tokenizer=tokenizer, num_envs=2, max_prompt_tokens=60, max_length=128)
    policy = make_policy(tokenizer, seed=1)
    rollout = collect(env, policy, num_episodes=8, seed=0)
    mask = rollout["mask"]
    log_prob = policy.evaluate(rollout).log_prob
    torch.testing.assert_close(log_prob[mask], rollout["log_prob"][mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize("returned, expected", [
    ({"reset": "only"}, "reset returned 'only', expected a tuple of 2: observation, info"),
    ({"reset": "ab"}, "reset returned 'ab', expected a tuple of 2"),
    ({"step": ("hi", 1.0, False, False, None)}, "step returned the info None, expected a dictionary"),
    ({"step": ("hi", "1", False, False, {})}, "gave the reward '1', expected a number"),
    ({"step": ("hi", 1.0, "False", False, {})}, "step returned terminated 'False', expected True or False"),
    ({"step": ("hi", 1.0, False, "", {})}, "step returned truncated '', expected True or False"),
])  # fmt: skip
def test_results_of_another_form_are_named(returned, expected):
    class Odd(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(40)

        def reset(self, *, seed=None, options=None):
            return returned.get("reset", ("a", {}))

        def step(self, action):
            return returned["step"]

    tokenizer = make_tokenizer(WORDS)
    env = TokenVectorEnv(Odd, tokenizer=tokenizer, max_prompt_tokens=9, max_new_tokens=3, max_length=60)
    with pytest.raises(TypeError, match=expected):
        collect(env, LMPolicy(make_gpt2(), tokenizer), num_episodes=2)


@pytest.mark.heavy
def test_a_step_of_four_values_is_named():
    class Old(Parrot):
        def step(self, action):
            return super().step(action)[:4]

    tokenizer = make_tokenizer(WORDS)
    env = TokenVectorEnv(Old, tokenizer=tokenizer, max_prompt_tokens=9, max_new_tokens=3, max_length=60)
    with refused(TypeError, "Old", "step returned", "expected a tuple of 5: observation, reward, terminated"):
        collect(env, LMPolicy(make_gpt2(), tokenizer), num_episodes=2)
