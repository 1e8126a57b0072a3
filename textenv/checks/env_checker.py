"""`check_text_env`: checks for common bugs in text environments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from textenv.checks.env_driver import MAX_STEPS, EnvDriver, ScriptedStep, StepResult, ids_of
from textenv.prompts.plain_text import plain_text
from textenv.rollout import (
    Allowed,
    EpisodeEnv,
    allowed_tokens,
    episode_of_row,
    is_episode_env,
    number_in_episode,
)

if TYPE_CHECKING:
    from tensordict import TensorDict

NO_EOS = "EOS is forbidden here or unknown (it is read from env.tokenizer)"
NO_EOS_HERE = "the action mask or a limit prevents EOS where this check needs it"


class CheckResult(NamedTuple):
    """Result of a check."""

    name: str
    problem: str
    """Error and its place; empty if the check passes."""
    left_out: str = ""
    """Reason why the check, or a part of it, could not run; empty if all of it ran."""

    @property
    def verdict(self) -> str:
        """Result in words: the problem, ``"not checked: ..."`` or ``"holds"``."""
        if self.problem:
            return self.problem
        if self.left_out:
            return f"not checked: {self.left_out}"
        return "holds"


def check_text_env(env: gymnasium.Env | VectorEnv) -> None:
    """Check an environment for common bugs; takes seconds and resets the environment.

    Args:
        env: a `TextEnv`, a `TextVectorEnv`, or any other Gymnasium environment, single or vector, with the spaces
            ``Dict(tokens, length)`` and ``Discrete``, and optionally a `transformers` tokenizer as ``env.tokenizer``.

    Raises:
        ValueError: if any check fails; lists the failed checks and their problems.

    Example:
        >>> check_text_env(gymnasium.make("textenv/Copy-v0"))  # doctest: +SKIP
    """
    raise_if_broken(run_checks(env))


def raise_if_broken(results: Sequence[CheckResult], *, owner: str = "") -> None:
    """Raise a ValueError that lists all failed checks, if there are any."""
    broken = [result for result in results if result.problem]
    if broken:
        problems = "\n".join(f"- {result.name}: {result.problem}" for result in broken)
        raise ValueError(f"{owner}{len(broken)} of {len(results)} checks failed:\n{problems}")


def run_checks(env: gymnasium.Env | VectorEnv) -> list[CheckResult]:
    """Run every check and return the results, including exceptions of the environment. Raises as `EnvDriver` does."""
    EnvDriver(env)  # raises if the spaces are wrong
    results = []
    for name, check in CHECKS.items():
        problem = ""
        left_out = ""
        try:
            left_out = check(EnvDriver(env))
        except _BrokenError as error:
            problem = str(error)
        except Exception as error:  # a user's environment may raise anything; report it
            problem = f"the environment raised {type(error).__name__}: {error}"
        results.append(CheckResult(name, problem, left_out))
    return results


class _BrokenError(Exception):
    """Failure of a check."""


def _demand(holds: object, problem: str) -> None:
    """Fail the check with this problem unless the condition holds."""
    if not holds:
        raise _BrokenError(problem)


def _check_spaces(driver: EnvDriver) -> str:
    """Observations are in the declared space, and are copies."""
    driver.reset(0)
    for _ in range(3):
        for slot, observation in enumerate(driver.observations()):
            _demand(
                driver.observation_space.contains(observation),
                f"slot {slot} observes {observation!r:.300}, which is not in {driver.observation_space}",
            )
        returned = driver.observation
        copies = {name: column.copy() for name, column in returned.items()}
        driver.step(driver.word(0))
        _demand(
            all((returned[name] == copies[name]).all() for name in copies),
            "step changed an observation that was returned before: return a copy",
        )
    return ""


def _check_ids(driver: EnvDriver) -> str:
    """A state begins with the previous state and the action, or is a new context: no text is tokenized again."""
    ids = driver.reset(0)
    for step in range(12):
        token = driver.word(step)
        result = driver.step(token)
        if result.done:
            break
        expected = [*ids, token]
        _demand(
            result.is_new_context or result.ids[: len(expected)] == expected,
            f"at step {step} the ids {ids} and the action {token} became {result.ids}: append the action's id, and "
            "never tokenize decoded text",
        )
        ids = result.ids
    return ""


def _check_end_tokens(driver: EnvDriver) -> str:
    """The tokens that end the model's turns end a turn, pad does not, and only padding follows the text.

    Pad may end a turn if it is one of these tokens.
    """
    # Padding
    for _ in range(2):
        driver.reset(None)
        length = len(driver.ids)
        ids_after_text = set(driver.observation["tokens"][0, length:].tolist())
        _demand(
            len(ids_after_text) <= 1,
            f"after its {length} ids a state has {sorted(ids_after_text)}, expected one padding id",
        )

    # Ends
    if not driver.may_choose(driver.eos):
        return NO_EOS
    for end in driver.turn_ends:
        ids = driver.reset(0)
        if not driver.may_choose(end):
            continue
        result = driver.step(end)
        name = "EOS"
        if driver.tokenizer is not None and end != driver.tokenizer.eos_token_id:
            name = str(driver.tokenizer.convert_ids_to_tokens(end))
        _demand(
            result.done or driver.has_replied(ids, result) or driver.conversation,
            f"{name} (id {end}) did not end the turn: the next state is {result.ids}. The model ends its turns with it "
            "(textenv.lm.ends.turn_ends)",
        )

    # Pad, unless any token would end the episode
    pad = driver.pad
    driver.reset(0)
    if pad not in driver.turn_ends and driver.may_choose(pad) and not driver.step(driver.word(1)).done:
        driver.reset(0)
        result = driver.step(pad)
        _demand(not result.done, f"the pad token (id {pad}) ended the episode, only EOS and stop tokens may")
    return ""


def _check_score_placement(driver: EnvDriver) -> str:
    """`step` gives a reward only at the end of a turn."""
    ids = driver.reset(0)
    for step in range(40):
        # Every fourth token is EOS, if it may be
        words = np.inf
        if step % 4 == 3:
            words = 3
        token = driver.word(step, words=words)
        result = driver.step(token)
        turn_over = token in driver.turn_ends or result.done or driver.has_replied(ids, result)
        _demand(
            turn_over or result.reward == 0,
            f"step {step} gave reward {result.reward} in the middle of a turn: give it at the end of the turn",
        )
        ids = result.ids
        if result.done:
            ids = driver.reset(None)
    return ""


def _check_flags(driver: EnvDriver) -> str:
    """EOS terminates, the limit truncates, and EOS at the limit terminates."""
    # An episode without EOS
    driver.reset(0)
    for limit in range(1, MAX_STEPS + 1):
        word = driver.word(limit - 1)
        result = driver.step(word)
        _demand(
            not (result.terminated and result.truncated),
            f"after {limit} steps terminated and truncated are both True",
        )
        if result.done:
            break
    _demand(result.done, f"an episode without EOS does not end in {limit} steps: set a length limit")
    if driver.conversation:
        return "in a conversation the end of a turn need not end the episode"
    if driver.eos is None:
        return NO_EOS
    if word in driver.avoided_tokens:
        return "the action mask allowed only tokens that end a turn, so the limit was never reached"
    _demand(result.truncated, f"a completion cut after {limit} tokens without EOS is terminated, expected truncated")

    # EOS as the first token, and as the last one that the limit allows
    for words in sorted({0, limit - 1}):
        eos_result = driver.answer(words)
        if eos_result is None:
            return NO_EOS_HERE
        _demand(
            eos_result.terminated and not eos_result.truncated,
            f"EOS as token {words + 1} of at most {limit} gives terminated={eos_result.terminated}, "
            f"truncated={eos_result.truncated}: a completion with EOS is terminated, even at the limit",
        )
    return ""


def _check_seeds(driver: EnvDriver) -> str:
    """Equal seeds give equal prompts, different seeds different ones; a reset without a seed continues the order."""
    # Eight prompts after each seed
    sequences = []
    for seed in (1, 1, 2, 3, 4):
        prompts = [driver.reset(seed)]
        for _ in range(7):
            prompts.append(driver.reset(None))
        sequences.append(prompts)

    # The first two are of equal seeds, the others of different ones
    first, again, *other_seeds = sequences
    _demand(first == again, f"seed 1 gave {first[:3]}, then {again[:3]}")
    distinct_prompts = {tuple(ids) for prompts in sequences for ids in prompts}
    if len(distinct_prompts) < 2:
        return "there is only one prompt"
    _demand(
        any(prompts != first for prompts in other_seeds),
        "seeds 1 to 4 give the same prompts in the same order: sample them with the seed of reset",
    )
    _demand(
        any(ids != prompts[0] for prompts in sequences for ids in prompts),
        "every reset without a seed gives the first prompt again: continue the order",
    )
    return ""


def _check_no_leak(driver: EnvDriver) -> str:
    """The scored completion excludes the prompt, and is empty if EOS comes first."""
    if driver.conversation:
        return "in a conversation the completion is one of several turns"
    if driver.eos is None or driver.tokenizer is None:
        return NO_EOS
    for words in (0, 2):
        prompt_ids = driver.reset(0)
        result = driver.answer(words)
        if result is None:
            return NO_EOS_HERE

        # The completion that the environment reports, and the text of the tokens between prompt and EOS
        completion = result.info.get("completion")
        completion_ids = result.ids[len(prompt_ids) : -1]
        expected = str(driver.tokenizer.decode(completion_ids, skip_special_tokens=True))
        if driver.text_env is not None:
            expected = plain_text(completion_ids, driver.tokenizer)
        if completion is None:
            return "info has no 'completion' at the end of an episode"
        _demand(
            completion.strip() == expected.strip(),
            f"the completion {completion_ids} is reported as {completion!r}, expected {expected!r}: does it contain "
            "the prompt, or tokens of another episode?",
        )
    return ""


def _check_batched(driver: EnvDriver) -> str:
    """Episodes played by `advance` and by `step` have equal ids, masks, rewards and flags."""
    env = driver.vector
    num_episodes = driver.vector.num_envs + 4
    if not is_episode_env(env):
        return "the environment has no batched form (start_episodes, advance, take_episodes)"

    # The rollout of `advance`
    num_actions = _advance_to_end(driver, env, num_episodes, seed=11)
    rollout = env.take_episodes()
    begins_episode = (number_in_episode(rollout) == 0).numpy()
    is_init = rollout["is_init"].numpy()
    _demand(
        is_init[begins_episode, 0].all() and is_init.sum() == num_episodes,
        "is_init must be True in the first column only (of an episode of several rows, in that of its first row)",
    )

    # The same episodes by `step`
    allowed = allowed_tokens(rollout)
    rewards_by_step = np.zeros(num_episodes)
    some_left_out = env.metrics.get("reward/left_out", 0) > 0
    for step in driver.play(11, num_episodes):
        # Rows and columns of the episode's actions
        episode = step.episode
        rows = (episode_of_row(rollout) == episode).nonzero().flatten()
        actions = rollout["mask"][rows].nonzero()
        if not len(actions) and some_left_out:  # the reward does not apply to this completion
            continue
        _demand(
            len(actions) == num_actions[episode],
            f"episode {episode}: {num_actions[episode]} actions were taken, but the rollout's mask is True at "
            f"{len(actions)} entries",
        )

        number_of_row, column = actions[step.number].tolist()
        row = int(rows[number_of_row])
        _compare_step(step, rollout, row, column, allowed)
        rewards_by_step[episode] += step.result.reward
        if step.result.done:
            rewards = rollout["reward"][rows]
            rewards_to_end = [*rewards[:-1].flatten().tolist(), *rewards[-1, : column + 1].tolist()]
            _compare_rewards(rewards_by_step[episode], rewards.sum().item(), sum(rewards_to_end), episode=episode)
    return ""


def _advance_to_end(driver: EnvDriver, env: EpisodeEnv, num_episodes: int, *, seed: int) -> np.ndarray:
    """Play the script's episodes by `advance`; return the number of actions of each, int64 ``[num_episodes]``."""
    env.start_episodes(num_episodes, seed=seed)
    num_actions = np.zeros(num_episodes, dtype=np.int64)
    while env.running.any():
        running = env.running
        actions = np.zeros(len(running), dtype=np.int64)
        episodes, _ = env.running_episodes
        action_mask = env.action_mask
        for slot, episode in zip(np.flatnonzero(running), episodes, strict=True):
            slot_mask = None
            if action_mask is not None:
                slot_mask = action_mask[slot].numpy()
            actions[slot] = driver.scripted(int(episode), int(num_actions[episode]), slot_mask, words=2 + episode)
            num_actions[episode] += 1
        env.advance(actions)
    return num_actions


def _compare_step(step: ScriptedStep, rollout: TensorDict, row: int, column: int, allowed: Allowed | None) -> None:
    """Compare ids, mask and flags of a step with those in its row and column of a rollout.

    The rollout's ``allowed`` tokens are those of the actions of all rows, one row after the other.
    """
    # Ids
    where = f"episode {step.episode}, column {column}"
    if row != step.episode:
        where = f"episode {step.episode}, row {row}, column {column}"
    rollout_ids = rollout["observation"][row, : column + 1].tolist()
    _demand(step.state == rollout_ids, f"{where}: step gives the state {step.state}, the rollout {rollout_ids}")

    # Mask
    if step.mask is not None:
        if allowed is None:
            raise _BrokenError("step returns an action_mask, but the rollout has no column 'allowed'")
        action = int(rollout["mask"][:row].sum() + rollout["mask"][row, :column].sum())
        _demand(
            (allowed.rows(action, action + 1)[0].numpy() == step.mask).all(),
            f"{where}: the action_mask of step differs from the allowed tokens in the rollout",
        )

    # Flags
    flags = [step.result.terminated, step.result.truncated]
    rollout_flags = [rollout["terminated"][row, column].item(), rollout["truncated"][row, column].item()]
    _demand(
        flags == rollout_flags,
        f"{where}: terminated and truncated are {flags} with step, but {rollout_flags} in the rollout",
    )


def _compare_rewards(reward_by_step: float, reward: float, reward_to_end: float, *, episode: int) -> None:
    """Compare an episode's reward by `step` with that in the rollout, and with the part up to its last token.

    `step` gives a turn's reward at its end; a rollout may spread it over the turn's tokens.
    """
    _demand(
        np.isclose(reward_by_step, reward, atol=1e-5) and np.isclose(reward_to_end, reward, atol=1e-5),
        f"episode {episode} has the reward {reward_by_step:g} with step, {reward:g} in the rollout ({reward_to_end:g} "
        "up to its last token)",
    )


def _check_reset(driver: EnvDriver) -> str:
    """The next episode does not depend on the previous one, in the declared autoreset mode."""
    # Start of the second episode, after a first one without words and after one with three
    starts = []
    sampled_prompts = []
    for words in (0, 3):
        driver.reset(5)
        for number in range(MAX_STEPS):
            result = driver.step(driver.word(number, words=words))
            if result.done:
                break
        _demand(result.done, f"an episode did not end in {MAX_STEPS} steps")
        starts.append(_next_start(driver, result))
        sampled_prompts.append(driver.num_sampled_prompts)

    # Compare the starts, unless the slots share an order of prompts and took different numbers of them
    if driver.vector.num_envs > 1:
        _check_partial_reset(driver)
    if sampled_prompts[0] != sampled_prompts[1]:
        return "other slots took prompts in between, so the next prompts differ"
    _demand(
        starts[0] == starts[1],
        f"the second episode of seed 5 begins with {starts[0]} or {starts[1]}, depending on the completion of the "
        "first: clear the slot when an episode begins",
    )
    return ""


def _check_partial_reset(driver: EnvDriver) -> None:
    """A reset of slot 0 leaves the other slots unchanged, in any mode."""
    driver.reset(7)
    driver.step(driver.word(0))
    tokens_before = [observation["tokens"].copy() for observation in driver.observations()]
    only_first = np.arange(driver.vector.num_envs) == 0
    driver.observation, _ = driver.vector.reset(options={"reset_mask": only_first})
    tokens_after = [observation["tokens"] for observation in driver.observations()]
    for slot in range(1, len(tokens_before)):
        _demand(
            (tokens_before[slot] == tokens_after[slot]).all(),
            "reset(options={'reset_mask': ...}) changed a slot where the mask is False",
        )


def _next_start(driver: EnvDriver, last_result: StepResult) -> list[int]:
    """Proceed to the next episode after the last step of one, and check this transition; return the new ids."""
    if driver.mode is AutoresetMode.SAME_STEP:
        final_observation = last_result.info.get("final_obs")
        _demand(
            final_observation is not None and ids_of(final_observation) == last_result.ids,
            "in SAME_STEP mode info['final_obs'] is missing where an episode ended, or is not its final observation",
        )
    if driver.mode is AutoresetMode.NEXT_STEP:
        result = driver.step(driver.word(0))
        _demand(
            not result.done and result.reward == 0,
            f"in NEXT_STEP mode the step after an episode must only reset, but it gave reward {result.reward}, "
            f"terminated={result.terminated}, truncated={result.truncated}",
        )
        return result.ids
    return driver.next_episode()


CHECKS: dict[str, Callable[[EnvDriver], str]] = {
    "spaces": _check_spaces,
    "ids are preserved": _check_ids,
    "EOS and pad": _check_end_tokens,
    "score placement": _check_score_placement,
    "terminated or truncated": _check_flags,
    "seeds": _check_seeds,
    "no prompt in the answer": _check_no_leak,
    "batched equals single": _check_batched,
    "reset": _check_reset,
}
"""Checks by the name in the report."""


def checked_variants(env_id: str, **arguments: Any) -> list[tuple[str, Callable[[], gymnasium.Env | VectorEnv]]]:
    """Return constructors of a registered environment: single, and as a vector in each autoreset mode."""
    make_single = functools.partial(gymnasium.make, env_id, **arguments)
    variants: list[tuple[str, Callable[[], gymnasium.Env | VectorEnv]]] = [("single", make_single)]
    if gymnasium.spec(env_id).vector_entry_point:
        for mode in AutoresetMode:
            make_vector = functools.partial(gymnasium.make_vec, env_id, num_envs=3, **arguments, autoreset_mode=mode)
            variants.append((f"vector, {mode.name}", make_vector))
    return variants
