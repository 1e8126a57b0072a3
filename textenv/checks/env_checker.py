"""`check_text_env`: checks for common bugs in text environments."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from textenv.checks.env_driver import MAX_STEPS, EnvDriver, Seen, ids_of
from textenv.prompts.plain_text import plain_text
from textenv.rollout import allowed_tokens, is_episode_env

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
        return self.problem or (f"not checked: {self.left_out}" if self.left_out else "holds")


def check_text_env(env: Any) -> None:
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
        raise ValueError(
            f"{owner}{len(broken)} of {len(results)} checks failed:\n"
            + "\n".join(f"- {name}: {problem}" for name, problem, _ in broken)
        )


def run_checks(env: Any) -> list[CheckResult]:
    """Run every check and return the results, including exceptions of the environment. Raises as `EnvDriver` does."""
    EnvDriver(env)
    results = []
    for name, check in CHECKS.items():
        try:
            results.append(CheckResult(name, "", check(EnvDriver(env))))
        except _BrokenError as problem:
            results.append(CheckResult(name, str(problem)))
        except Exception as error:  # a user's environment may raise anything; report it
            results.append(CheckResult(name, f"the environment raised {type(error).__name__}: {error}"))
    return results


class _BrokenError(Exception):
    """Failure of a check."""


def _demand(holds: object, problem: str) -> None:
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
        held = {name: column.copy() for name, column in driver.observation.items()}
        now = driver.observation
        driver.step(driver.word(0))
        _demand(
            all((held[name] == now[name]).all() for name in held),
            "step changed an observation that was returned before: return a copy",
        )
    return ""


def _check_ids(driver: EnvDriver) -> str:
    """A state begins with the previous state and the action: no text is tokenized again."""
    before = driver.reset(0)
    for step in range(12):
        token = driver.word(step)
        seen = driver.step(token)
        if seen.done:
            break
        expected = [*before, token]
        _demand(
            seen.ids[: len(expected)] == expected,
            f"at step {step} the ids {before} and the action {token} became {seen.ids}: append the action's id, and "
            "never tokenize decoded text",
        )
        before = seen.ids
    return ""


def _check_end_tokens(driver: EnvDriver) -> str:
    """What ends the model's turns ends a turn, pad does not (unless it does), and only padding follows the text."""
    for _ in range(2):
        driver.reset(None)
        length = len(driver.ids)
        beyond = set(driver.observation["tokens"][0, length:].tolist())
        _demand(len(beyond) <= 1, f"after its {length} ids a state has {sorted(beyond)}, expected one padding id")
    if not driver.may(driver.eos):
        return NO_EOS
    for end in driver.turn_ends:
        before = driver.reset(0)
        if not driver.may(end):
            continue
        seen = driver.step(end)
        name = "EOS" if end == driver.tokenizer.eos_token_id else driver.tokenizer.convert_ids_to_tokens(end)
        _demand(
            seen.done or len(seen.ids) > len(before) + 1 or driver.conversation,
            f"{name} (id {end}) did not end the turn: the next state is {seen.ids}. The model ends its turns with it "
            "(textenv.lm.ends.turn_ends)",
        )
    pad = driver.pad
    driver.reset(0)
    if pad not in driver.turn_ends and driver.may(pad) and not driver.step(driver.word(1)).done:
        driver.reset(0)
        _demand(not driver.step(pad).done, f"the pad token (id {pad}) ended the episode, only EOS and stop tokens may")
    return ""


def _check_score_placement(driver: EnvDriver) -> str:
    """`step` gives a reward only at the end of a turn."""
    before = driver.reset(0)
    for step in range(40):
        token = driver.word(step, words=3 if step % 4 == 3 else np.inf)
        seen = driver.step(token)
        turn_over = token in driver.turn_ends or seen.done or len(seen.ids) > len(before) + 1
        _demand(
            turn_over or seen.reward == 0,
            f"step {step} gave reward {seen.reward} in the middle of a turn: give it at the end of the turn",
        )
        before = driver.reset(None) if seen.done else seen.ids
    return ""


def _check_flags(driver: EnvDriver) -> str:
    """EOS terminates, the limit truncates, and EOS at the limit terminates."""
    driver.reset(0)
    for limit in range(1, MAX_STEPS + 1):
        word = driver.word(limit - 1)
        seen = driver.step(word)
        _demand(not (seen.terminated and seen.truncated), f"after {limit} steps terminated and truncated are both True")
        if seen.done:
            break
    _demand(seen.done, f"an episode without EOS does not end in {limit} steps: set a length limit")
    if driver.conversation:
        return "in a conversation the end of a turn need not end the episode"
    if driver.eos is None:
        return NO_EOS
    if word in driver.ends:
        return "the action mask allowed only tokens that end a turn, so the limit was never reached"
    _demand(seen.truncated, f"a completion cut after {limit} tokens without EOS is terminated, expected truncated")
    for words in {0, limit - 1}:
        answered = driver.answer(words)
        if answered is None:
            return NO_EOS_HERE
        _demand(
            answered.terminated and not answered.truncated,
            f"EOS as token {words + 1} of at most {limit} gives terminated={answered.terminated}, "
            f"truncated={answered.truncated}: a completion with EOS is terminated, even at the limit",
        )
    return ""


def _check_seeds(driver: EnvDriver) -> str:
    """Equal seeds give equal prompts, different seeds different ones; a reset without a seed continues the order."""
    sequences = [[driver.reset(seed), *(driver.reset(None) for _ in range(7))] for seed in (1, 1, 2, 3, 4)]
    _demand(sequences[0] == sequences[1], f"seed 1 gave {sequences[0][:3]}, then {sequences[1][:3]}")
    distinct = {tuple(ids) for sequence in sequences for ids in sequence}
    _demand(
        len(distinct) < 2 or any(sequence != sequences[0] for sequence in sequences[2:]),
        "seeds 1 to 4 give the same prompts in the same order: sample them with the seed of reset",
    )
    _demand(
        len(distinct) < 2 or any(len({tuple(ids) for ids in sequence}) > 1 for sequence in sequences),
        "every reset without a seed gives the first prompt again: continue the order",
    )
    return "" if len(distinct) > 1 else "there is only one prompt"


def _check_no_leak(driver: EnvDriver) -> str:
    """The scored completion excludes the prompt, and is empty if EOS comes first."""
    if driver.conversation:
        return "in a conversation the completion is one of several turns"
    if driver.eos is None or driver.tokenizer is None:
        return NO_EOS
    for words in (0, 2):
        prompt, seen = driver.reset(0), driver.answer(words)
        if seen is None:
            return NO_EOS_HERE
        answer, chosen = seen.info.get("completion"), seen.ids[len(prompt) : -1]
        expected = driver.tokenizer.decode(chosen, skip_special_tokens=True)
        if driver.ours is not None:
            expected = plain_text(chosen, driver.tokenizer)
        if answer is None:
            return "info has no 'completion' at the end of an episode"
        _demand(
            answer.strip() == expected.strip(),
            f"the completion {chosen} is reported as {answer!r}, expected {expected!r}: does it contain the "
            "prompt, or tokens of another episode?",
        )
    return ""


def _check_batched(driver: EnvDriver) -> str:
    """Episodes played by `advance` and by `step` have equal ids, masks, rewards and flags."""
    env, episodes = driver.vector, driver.vector.num_envs + 4
    if not is_episode_env(env):
        return "the environment has no batched form (start_episodes, advance, take_episodes)"
    env.start_episodes(episodes, seed=11)
    count = np.zeros(episodes, dtype=np.int64)
    while (running := env.running).any():
        actions = np.zeros(len(running), dtype=np.int64)
        rows = env.cursor[0]
        allowed = env.action_mask
        for slot, row in zip(np.flatnonzero(running), rows, strict=True):
            mask = None if allowed is None else allowed[slot].numpy()
            actions[slot] = driver.scripted(int(row), int(count[row]), mask, words=2 + row)
            count[row] += 1
        env.advance(actions)
    rollout = env.take_episodes()
    begins = rollout["is_init"].numpy()
    _demand(begins[:, 0].all() and begins.sum() == episodes, "is_init must be True in the first column only")
    sets, by_step, there = allowed_tokens(rollout), np.zeros(episodes), rollout["reward"].sum(1).numpy()
    left_out = env.metrics.get("reward/left_out", 0)
    for row, number, ids, mask, seen in driver.play(11, episodes):
        chosen = np.flatnonzero(rollout["mask"][row].numpy())
        if not len(chosen) and left_out:  # the reward does not apply to this completion
            continue
        _demand(
            len(chosen) == count[row],
            f"episode {row}: {count[row]} actions were taken, but the rollout's mask is True at {len(chosen)} entries",
        )
        t = int(chosen[number])
        _demand(
            ids == rollout["observation"][row, : t + 1].tolist(),
            f"episode {row}, column {t}: step gives the state {ids}, the rollout "
            f"{rollout['observation'][row, : t + 1].tolist()}",
        )
        if mask is not None:
            _demand(sets is not None, "step returns an action_mask, but the rollout has no column 'allowed'")
            entry = int(rollout["mask"][:row].sum()) + number
            _demand(
                sets is None or (sets.rows(entry, entry + 1)[0].numpy() == mask).all(),
                f"episode {row}, column {t}: the action_mask of step differs from the allowed tokens in the rollout",
            )
        flags = [rollout[name][row, t].item() for name in ("terminated", "truncated")]
        _demand(
            flags == [seen.terminated, seen.truncated],
            f"episode {row}, column {t}: terminated and truncated are {[seen.terminated, seen.truncated]} with step, "
            f"but {flags} in the rollout",
        )
        by_step[row] += seen.reward
        # `step` gives a turn's reward at its end; a rollout may spread it over the turn's tokens.
        paid = rollout["reward"][row, : t + 1].sum().item()
        _demand(
            not seen.done
            or np.isclose(by_step[row], there[row], atol=1e-5)
            and np.isclose(paid, there[row], atol=1e-5),
            f"episode {row} has the reward {by_step[row]:g} with step, {there[row]:g} in the rollout ({paid:g} up "
            "to its last token)",
        )
    return ""


def _check_reset(driver: EnvDriver) -> str:
    """The next episode does not depend on the previous one, in the declared autoreset mode."""
    starts, dealt = [], []
    for words in (0, 3):
        driver.reset(5)
        for step in range(MAX_STEPS):
            seen = driver.step(driver.word(step, words=words))
            if seen.done:
                break
        _demand(seen.done, f"an episode did not end in {MAX_STEPS} steps")
        starts.append(_next_start(driver, seen))
        dealt.append(driver.dealt)
    if driver.vector.num_envs > 1:
        _check_partial_reset(driver)
    if dealt[0] != dealt[1]:
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
    before = [observation["tokens"].copy() for observation in driver.observations()]
    only_first = np.arange(driver.vector.num_envs) == 0
    driver.observation, _ = driver.vector.reset(options={"reset_mask": only_first})
    after = [observation["tokens"] for observation in driver.observations()]
    _demand(
        all((one == two).all() for one, two in zip(before[1:], after[1:], strict=True)),
        "reset(options={'reset_mask': ...}) changed a slot where the mask is False",
    )


def _next_start(driver: EnvDriver, seen: Seen) -> list[int]:
    if driver.mode is AutoresetMode.SAME_STEP:
        final = seen.info.get("final_obs")
        _demand(
            final is not None and ids_of(final) == seen.ids,
            "in SAME_STEP mode info['final_obs'] is missing where an episode ended, or is not its final observation",
        )
    if driver.mode is AutoresetMode.NEXT_STEP:
        after = driver.step(driver.word(0))
        _demand(
            not after.done and after.reward == 0,
            f"in NEXT_STEP mode the step after an episode must only reset, but it gave reward {after.reward}, "
            f"terminated={after.terminated}, truncated={after.truncated}",
        )
        return after.ids
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


def checked_variants(env_id: str, **arguments: Any) -> list[tuple[str, Callable[[], Any]]]:
    """Return constructors of a registered environment: single, and as a vector in each autoreset mode."""
    forms: list[tuple[str, Callable[[], Any]]] = [("single", functools.partial(gymnasium.make, env_id, **arguments))]
    if gymnasium.spec(env_id).vector_entry_point:
        make = functools.partial(gymnasium.make_vec, env_id, num_envs=3, **arguments)
        forms += [(f"vector, {mode.name}", functools.partial(make, autoreset_mode=mode)) for mode in AutoresetMode]
    return forms
