"""`check_text_env` against environments with one bug each, which one check finds and no other."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from algos.cli import main
from tests.helpers.conversations import Parrot
from tests.helpers.models import WORDS, make_tokenizer
from textenv import TextEnv, TextVectorEnv, TokenVectorEnv, check_text_env
from textenv.checks.env_checker import CHECKS, run_checks
from textenv.prompts.prompts import Prompt
from textenv.rollout import number_in_episode

EOS, PAD = WORDS.index("<eos>"), WORDS.index("<pad>")
ARGUMENTS = dict(prompts=["a b", "c", "d a b", "a", "b c"], max_prompt_tokens=4, max_new_tokens=5)


def reward(prompts, completions, **columns):
    return [0.5 + text.split().count("good") for text in completions]


def make(cls=TextVectorEnv, **options):
    return cls(**(ARGUMENTS | {"reward": reward, "tokenizer": make_tokenizer(WORDS)} | options))


class HandsOutItsOwnArrays(TextVectorEnv):
    def reset(self, *, seed=None, options=None):
        self.shown, info = super().reset(seed=seed, options=options)
        return self.shown, info

    def step(self, actions):
        observation, *rest = super().step(actions)
        for name, values in observation.items():
            self.shown[name][:] = values
        return self.shown, *rest


class Rereads(TextVectorEnv):
    """As if ids were made from lower-cased text: some come back as others."""

    def step(self, actions):
        return super().step(np.where(actions == 2, 1, actions))

    def advance(self, actions):
        return super().advance(np.where(actions == 2, 1, actions))


class EndsAtPad(TextVectorEnv):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ends.is_end[PAD] = True


class ForgetsToPad(TextVectorEnv):
    def reset(self, *, seed=None, options=None):
        return self.unpadded(*super().reset(seed=seed, options=options))

    def step(self, actions):
        return self.unpadded(*super().step(actions))

    def unpadded(self, observation, *rest):
        observation["tokens"][:, -2:] = [3, 4]
        return observation, *rest


class Counts(TextVectorEnv):
    """Knows how many tokens each slot's episode has, and which slots are over."""

    def reset(self, *, seed=None, options=None):
        self.count, self.over = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=bool)
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        self.acted = ~self.over
        self.count = np.where(self.acted, self.count + 1, 0)
        observation, reward, terminated, truncated, info = super().step(actions)
        self.over = terminated | truncated
        return observation, reward, terminated, truncated, info


class PaysForEveryToken(Counts):
    def step(self, actions):
        observation, reward, *rest = super().step(actions)
        return observation, reward + np.float32(0.125) * self.acted, *rest

    def take_episodes(self):
        rollout = super().take_episodes()
        rollout["reward"] += 0.125 * rollout["mask"]
        return rollout


class CallsTheLimitTruncatedThoughItEnded(Counts):
    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        full = self.count == 5
        return observation, reward, terminated & ~full, truncated | terminated & full, info

    def take_episodes(self):
        rollout = super().take_episodes()
        full = rollout["mask"].sum(1, keepdim=True) == 5
        rollout["truncated"] |= rollout["terminated"] & full
        rollout["terminated"] &= ~full
        return rollout


class EndsWithoutALimit(TextVectorEnv):
    """A limit that terminates: the flag of a failure on a cut."""

    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        return observation, reward, terminated | truncated, np.zeros_like(truncated), info

    def take_episodes(self):
        rollout = super().take_episodes()
        rollout["terminated"] |= rollout["truncated"]
        rollout["truncated"][:] = False
        return rollout


class IgnoresTheSeed(TextVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else 0, options=options)

    def start_episodes(self, episodes, *, seed=None, **options):
        return super().start_episodes(episodes, seed=None if seed is None else 0, **options)


class DealsTheFirstPromptForEver(TextVectorEnv):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        deal = self.task.sample_prompts
        self.task.sample_prompts = lambda numbers, *, seed: deal(range(len(numbers)), seed=seed)


class LeaksThePrompt(TextVectorEnv):
    """TRL's notebook: an answer of EOS alone is cut at position 0 from the end, and the prompt remains."""

    def step(self, actions):
        *rest, info = super().step(actions)
        said = info.get("final_info", info)
        if "completion" in said:
            for slot in np.flatnonzero(said["_completion"]):
                said["completion"][slot] = said["completion"][slot] or said["prompt"][slot]
        return *rest, info


class ShiftsTheScores(TextVectorEnv):
    def take_episodes(self):
        rollout = super().take_episodes()
        rollout["reward"] = rollout["reward"].roll(1, 0)
        return rollout


class MasksEOS(TextVectorEnv):
    """EOS left out of the mask (verl, TRL: pad = EOS)."""

    def take_episodes(self):
        rollout = super().take_episodes()
        rollout["mask"] &= rollout["action"] != EOS
        return rollout


class KeepsTheOldAnswer(Counts):
    """A slot that resets itself keeps the first token of the answer before."""

    def reset(self, *, seed=None, options=None):
        self.first, self.stale = np.zeros(self.num_envs, dtype=int), np.full(self.num_envs, -1)
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        observation, *rest = super().step(actions)
        self.first = np.where(self.count == 1, actions, self.first)
        begun = self.over if self.autoreset_mode is AutoresetMode.SAME_STEP else ~self.acted
        self.stale[begun] = np.where(self.first < 7, self.first, 0)[begun]
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            self.over[:] = False
            self.count[begun] = 0
        kept = self.stale >= 0
        observation["tokens"][kept, 0] = self.stale[kept]
        return observation, *rest


BROKEN = {
    HandsOutItsOwnArrays: "spaces",
    Rereads: "ids are preserved",
    EndsAtPad: "EOS and pad",
    ForgetsToPad: "EOS and pad",
    PaysForEveryToken: "score placement",
    CallsTheLimitTruncatedThoughItEnded: "terminated or truncated",
    EndsWithoutALimit: "terminated or truncated",
    IgnoresTheSeed: "seeds",
    DealsTheFirstPromptForEver: "seeds",
    LeaksThePrompt: "no prompt in the answer",
    ShiftsTheScores: "batched equals single",
    MasksEOS: "batched equals single",
    KeepsTheOldAnswer: "reset",
}


def found(env):
    return {result.name for result in run_checks(env) if result.problem}


@pytest.mark.heavy
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_sound_environment_passes_in_every_mode(mode, num_envs):
    check_text_env(make(num_envs=num_envs, autoreset_mode=mode))
    check_text_env(make(num_envs=num_envs, autoreset_mode=mode, forbidden=[EOS]))
    check_text_env(make(num_envs=num_envs, autoreset_mode=mode, min_new_tokens=2))
    tokenizer = make_tokenizer(WORDS)
    check_text_env(TokenVectorEnv(Parrot, tokenizer=tokenizer, num_envs=num_envs, autoreset_mode=mode))


def test_single_and_registered_environments_pass():
    check_text_env(make(TextEnv))
    check_text_env(gymnasium.make("textenv/Copy-v0"))


def test_every_check_has_an_environment_of_its_own():
    assert set(BROKEN.values()) == set(CHECKS)


@pytest.mark.parametrize("cls", BROKEN)
def test_each_bug_is_found_by_its_check_alone(cls):
    env = make(cls, num_envs=3)
    assert found(env) == {BROKEN[cls]}
    with pytest.raises(ValueError, match="1 of 9 checks failed") as caught:
        check_text_env(env)
    assert BROKEN[cls] in str(caught.value)


def test_autoreset_bugs_are_found_in_other_modes():
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        assert found(make(KeepsTheOldAnswer, autoreset_mode=mode, num_envs=2)) == {"reset"}


class ByHand(gymnasium.Env):
    """Written from scratch, without anything of ours: 'a' and then four tokens, or EOS."""

    tokenizer = make_tokenizer(WORDS)

    def __init__(self, *, seeded=True):
        self.observation_space = spaces.Dict(
            tokens=spaces.Box(0, 8, (6,), np.int64), length=spaces.Box(0, 6, (), np.int64)
        )
        self.action_space, self.seeded = spaces.Discrete(9), seeded

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed if self.seeded or seed is None else 0)
        self.ids = [int(self.np_random.integers(6))]
        return self.observe(), {}

    def step(self, action):
        self.ids.append(int(action))
        ended, full = action == EOS, len(self.ids) == 6
        info = {"completion": self.tokenizer.decode(self.ids[1:], skip_special_tokens=True)} if ended or full else {}
        return self.observe(), float(ended), bool(ended), bool(full and not ended), info

    def observe(self):
        tokens = np.full(6, PAD)
        tokens[: len(self.ids)] = self.ids
        return {"tokens": tokens, "length": np.array(len(self.ids))}


def test_an_environment_from_scratch_is_checked():
    check_text_env(ByHand())
    assert found(ByHand(seeded=False)) == {"seeds"}


class TruncatesAtEOS(ByHand):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, False, terminated or truncated, info


class GoesOnAfterEOS(ByHand):
    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, len(self.ids) == 6, info


class TerminatesAtTheLimit(ByHand):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, False, info


class LeaksByHand(ByHand):
    def step(self, action):
        *rest, info = super().step(action)
        said = {"completion": self.tokenizer.decode(self.ids, skip_special_tokens=True)}
        return *rest, said if info else {}


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (TruncatesAtEOS, "terminated or truncated"),
        (GoesOnAfterEOS, "EOS and pad"),
        (TerminatesAtTheLimit, "terminated or truncated"),
        (LeaksByHand, "no prompt in the answer"),
    ],
)
def test_bugs_of_environments_from_scratch_are_found(cls, name):
    assert name in found(cls())


def test_what_could_not_be_checked_is_said():
    results = {result.name: result.verdict for result in run_checks(ByHand())}
    assert results["batched equals single"].startswith("not checked: the environment has no batched form")
    assert results["ids are preserved"] == "holds"


@pytest.mark.heavy
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize(
    "options",
    [
        {"stop": [0, 2, 4]},
        {"stop": ["good", "b c"]},
        {"allowed": lambda turn: [0, 1] if not turn.completion_ids else [EOS]},
        {"max_length": 8, "max_prompt_tokens": 4},
        {"max_new_tokens": 1},
        {"prompts": ["a"]},
    ],
    ids=["stop ids", "stop texts", "a choice and EOS", "tight length", "one token", "one prompt"],
)
def test_no_false_alarm_on_sound_environments(mode, options):
    check_text_env(make(num_envs=3, autoreset_mode=mode, **options))
    check_text_env(make(TextEnv, **options))


class ForgetsTheSets(TextVectorEnv):
    def take_episodes(self):
        return super().take_episodes().exclude("allowed", "allowed_sets")


class BeginsEverywhere(TextVectorEnv):
    def take_episodes(self):
        rollout = super().take_episodes()
        rollout["is_init"][:] = True
        return rollout


class ResetsAll(TextVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (ForgetsTheSets, "batched equals single"),
        (BeginsEverywhere, "batched equals single"),
        (ResetsAll, "reset"),
    ],
)
def test_more_bugs_of_vector_environments(cls, name, mode):
    assert found(make(cls, num_envs=3, autoreset_mode=mode, min_new_tokens=1)) == {name}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["textenv/Copy-v0"], 0),
        (["textenv/GuessNumber-v0", "--env-kwargs", '{"high": 8}'], 0),
        (["textenv/Broken-v0"], 1),
        (["CartPole-v1"], 2),
        (["no_module:Copy-v0"], 2),
        (["textenv/Copy-v0", "--env-kwargs", "[]"], 2),
    ],
)
def test_the_exit_status_says_whether_all_holds(words, status, capsys):
    gymnasium.register("textenv/Broken-v0", lambda: ByHand(seeded=False))
    try:
        main(["check", *words, "--json"])
        given = 0
    except SystemExit as end:
        given = end.code
    finally:
        del gymnasium.registry["textenv/Broken-v0"]
    printed = capsys.readouterr()
    assert given == status
    if status == 2:
        assert len(printed.err) > 40
    else:
        results = json.loads(printed.out)
        assert results.pop("sound") == (status == 0)
        broken = [name for name, said in results.items() if said != "holds" and not said.startswith("not checked")]
        assert broken == ["single: seeds"] * status


def test_another_kind_of_environment_is_refused():
    with pytest.raises(ValueError, match="expected Dict"):
        check_text_env(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_environment_with_a_history_passes(mode, history):
    env = TokenVectorEnv(
        Parrot, tokenizer=make_tokenizer(WORDS), num_envs=3, max_prompt_tokens=4, max_new_tokens=4, history=history,
        forbidden=[WORDS.index("good")], autoreset_mode=mode,
    )  # fmt: skip
    assert [result.problem for result in run_checks(env) if result.problem] == []


class Edits:
    """A task of one's own: it appends a text, then gives a new context, which may begin like the former one."""

    def __init__(self):
        self.history = []  # a name of its own, which says nothing about rows

    def sample_prompts(self, numbers, *, seed):
        rng = np.random.default_rng(seed)
        order = rng.permutation(4)
        return [Prompt(("c", "a b", "d", "b")[order[number % 4]]) for number in numbers]

    def reply(self, turns):
        self.history += [turn.completion for turn in turns]
        return [(" a", Prompt("a b"), Prompt("a b c d a b c d"), None)[turn.index] for turn in turns]

    def score(self, turns):
        return [float(turn.index) for turn in turns]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_task_that_gives_new_contexts_passes(mode):
    env = TextVectorEnv(
        Edits(), tokenizer=make_tokenizer(WORDS), num_envs=3, max_turns=5, max_new_tokens=3, autoreset_mode=mode
    )
    assert [result.problem for result in run_checks(env) if result.problem] == []


class LosesARow(TokenVectorEnv):
    """The second rows of its episodes have no actions."""

    def take_episodes(self):
        rollout = super().take_episodes()
        rollout["mask"] &= (number_in_episode(rollout) != 1)[:, None]
        return rollout


def test_a_row_that_is_lost_is_noticed():
    env = LosesARow(Parrot, tokenizer=make_tokenizer(WORDS), num_envs=3, max_prompt_tokens=4, history=1)
    problems = [result.problem for result in run_checks(env) if result.problem]
    assert len(problems) == 1 and "actions were taken, but the rollout's mask is True at" in problems[0]
