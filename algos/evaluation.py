"""Evaluation of a policy on whole episodes, without learning."""

import dataclasses
import html
import logging
import math
import shutil
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from tensordict import TensorDict

from algos.collection import collect
from algos.make import make_vector_environment, takes_model
from algos.policies.policy import Policy, check_policy, check_spaces
from algos.statistics.pass_rates import Answer, PassRates, PromptSamples, Sampling, pass_rates, read_sampling
from algos.storage.env_state import kept_object_states, share_objects
from algos.storage.run_files import BEST
from algos.storage.run_folder import agent_steps, replacing
from algos.training.metrics import EpisodeMeter, Metrics, reference_metrics
from algos.training.run import Callback, Run
from textenv.envs.limits import check_at_least
from textenv.envs.task import SeveralAgents
from textenv.envs.text_env import TextEnv
from textenv.envs.turn import Turn
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.penalty import KLPenalty
from textenv.names import check_names
from textenv.programs.task import Programs
from textenv.prompts.prompts import PromptList
from textenv.rendering import rollout_html
from textenv.rollout import is_episode_env, join_episodes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
NUM_SLOTS = 16
"""Maximum number of slots of an environment that is given by its id."""
DEFAULT_EPISODES = 20
"""Number of episodes of an evaluation that does not sample prompts several times."""
ROWS_OF_KL = 512
"""Maximum number of rows whose KL is measured at once: many samples of many prompts would not fit into memory."""
EPISODES_IN_NOTEBOOK = 8
"""Maximum number of episodes whose texts a notebook shows."""


class _ReturnsAndRollout(NamedTuple):
    """What ``returns, rollout = evaluate(…)`` unpacks; the tokenizer of `EvaluationResult` is not a part of it."""

    returns: list[float]
    """Return of each episode, as paid by the environment."""
    rollout: TensorDict


class EvaluationResult(_ReturnsAndRollout):
    """Result of `evaluate`: ``returns`` of the episodes, and the ``rollout``.

    A notebook shows the first texts, each token shaded by its log-probability.
    """

    tokenizer: "PreTrainedTokenizerBase | None" = None
    """Tokenizer of a policy that writes text; None in control."""
    pass_rates: PassRates | None = None
    """pass@k and so on, if ``k`` was given. The returns and the rollout are then of the samples, those of a prompt one
    below the other."""

    def __repr__(self) -> str:
        statistics = f"mean_return={self.mean_return:.4g}, std_return={self.std_return:.4g}"
        if self.pass_rates is not None:
            for name, figure in self.pass_rates.estimates().items():
                statistics += f", {name}={figure.mean:.4g}"
        return f"EvaluationResult({statistics}, n={len(self.returns)})"

    def _repr_html_(self) -> str:
        """Mean return, and the first episodes of text, each token shaded by its log-probability."""
        page = f"<p>mean return {self.mean_return:.4g} over {len(self.returns)} episodes</p>"
        if self.pass_rates is not None:
            page += f"<pre>{html.escape(str(self.pass_rates))}</pre>"
        if self.tokenizer is None:
            return page
        for row in range(min(EPISODES_IN_NOTEBOOK, len(self.rollout))):
            page += rollout_html(self.rollout, row, self.tokenizer)
        return page

    @property
    def mean_return(self) -> float:
        """Mean over the episodes; NaN if none has a score."""
        if not self.returns:
            return math.nan
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation over the episodes; NaN if none has a score."""
        if not self.returns:
            return math.nan
        return float(np.std(self.returns))


@check_names
def evaluate(
    env: VectorEnv | gymnasium.Env | str,
    policy: Policy,
    *,
    num_episodes: int | None = None,
    deterministic: bool = False,
    seed: int = 0,
    k: int | Sequence[int] | None = None,
    num_samples: int | None = None,
    num_prompts: int | None = None,
    by: str | None = None,
    success: float = 1.0,
    answer: Answer | None = None,
) -> EvaluationResult:
    """Play whole episodes; with ``k``, several of each prompt.

    Rewards with a state, such as `Normalize`, use their present state and do not change it.

    With ``k`` (text), each prompt is played once with the most probable tokens and ``num_samples`` times with sampled
    ones. The result then has ``pass_rates``: the greedy pass rate, pass@k (at least one of k samples passes) and maj@k
    (the most frequent answer of k samples passes), with 95 % limits over the prompts. Both are means over all subsets
    of k samples, so they have no bias, and do not depend on the number of slots. An episode without a score has not
    passed.

    Args:
        env: vector environment, which is reset with ``seed`` first. A single environment becomes one slot. An id (see
            `algos.make.make_vector_environment`) becomes up to 16 slots, for text with prompts of the test split.
        policy: the policy to evaluate; its generator and memory are unchanged afterwards.
        num_episodes: exact number of episodes, by default 20; not with ``k``.
        deterministic: take the most probable action instead of a sample; with ``k`` both are played.
        seed: seed of prompts or start states, and of the sampled actions.
        k: number of samples, or several, such as ``(1, 8, 64)``.
        num_samples: samples of each prompt; None: the largest k. More make the smaller k's more precise.
        num_prompts: number of different prompts; None: all that the environment has.
        by: column of the prompts; the pass rates are also given for the prompts of each of its values.
        success: an episode passes if its return is at least this.
        answer: function from a completion to the answer that is voted on for maj@k; None as its result abstains. By
            default the task's ``extract`` (`textenv.ReasoningGym` has one), else the completion without white space
            around it. Where episodes may have several turns there is no vote without it; it gets the last turn.

    Returns:
        Return of each episode, and the rollout: read ``.mean_return`` and ``.pass_rates``, or unpack the tuple.

    Raises:
        TypeError: if ``env`` is not an environment, or ``policy`` cannot play it; perhaps they are swapped.
        ValueError: if the policy was made for other spaces, or the environment id is unknown; if numbers do not fit
            each other or the environment, or a prompt has no such column.
    """
    check_at_least("seed", seed, 0)
    sampling = read_sampling(k, num_samples=num_samples, num_prompts=num_prompts, by=by, success=success, answer=answer)
    num_episodes = _num_episodes(num_episodes, sampling)
    _check_deterministic(deterministic, sampling)
    num_slots = num_episodes
    if sampling is not None:
        num_slots = NUM_SLOTS
    env = _vector_env(env, policy, num_slots)
    check_spaces(env, policy)
    if sampling is not None:
        sampling = fit_sampling(sampling, env)

    # Evaluating during training changes neither what is trained nor which prompts come next. The fork has a memory of
    # its own, but shares the policy's generator, whose state is put back.
    player = policy.fork()
    generator_state = policy.generator.get_state()
    policy.generator.manual_seed(seed)
    try:
        env_fork = env.fork() if is_episode_env(env) else kept_object_states(env)
        with env_fork:
            if sampling is not None:
                result = _sample_prompts(env, player, sampling, seed)
            else:
                rollout = collect(env, player, num_episodes=num_episodes, seed=seed, deterministic=deterministic)
                returns, _ = EpisodeMeter().finished(rollout)
                result = EvaluationResult(returns, rollout)
    finally:
        policy.generator.set_state(generator_state)
    num_wrong = sum(not math.isfinite(value) for value in result.returns)
    if num_wrong:
        logger.warning(
            "%d of %d episodes have a return of NaN or infinity: the environment or the reward pays such numbers",
            num_wrong,
            len(result.returns),
        )
    result.tokenizer = getattr(policy, "tokenizer", None)
    return result


def _num_episodes(num_episodes: int | None, sampling: Sampling | None) -> int:
    """Return the number of episodes of an evaluation without ``k``; raise a ValueError if it is given with it."""
    if num_episodes is None:
        return DEFAULT_EPISODES
    if sampling is not None:
        raise ValueError(
            f"num_episodes is {num_episodes}, but k is given: say how many prompts by num_prompts, each of which is "
            f"sampled num_samples={sampling.num_samples} times"
        )
    if num_episodes < 1:
        raise ValueError(f"num_episodes is {num_episodes}, expected at least 1")
    return num_episodes


def _check_deterministic(deterministic: bool, sampling: Sampling | None) -> None:
    """Raise a ValueError if the most probable actions are asked for together with ``k``."""
    if sampling is not None and deterministic:
        raise ValueError("deterministic is True and k is given: leave one out (with k, both ways are played)")


# --- several samples of each prompt -------------------------------------------------------------------------------


def fit_sampling(sampling: Sampling, env: VectorEnv) -> Sampling:
    """Return the sampling with its number of prompts; raise a ValueError if it does not fit the environment."""
    if not isinstance(env, TextVectorEnv):
        raise ValueError(
            f"k is {sampling.k}, but {type(env).__name__} is a control environment, which has no prompts to sample "
            "several times: leave k out"
        )
    task = env.task
    if isinstance(task, SeveralAgents) and task.agents > 1:
        raise ValueError(f"k is {sampling.k}, but a game of {task.agents} agents has no pass or failure: leave k out")

    # Each prompt, or task of a program, counts once
    available = None
    if isinstance(task, PromptList):
        available = len(task.prompts)
    elif isinstance(task, Programs) and task.tasks is not None:
        available = len(task.tasks)
    num_prompts = sampling.num_prompts
    if num_prompts is None:
        num_prompts = available
    if num_prompts is None:
        raise ValueError(
            f"num_prompts is None, but {type(task).__name__} makes its prompts itself, without end: give a number"
        )
    if available is not None and num_prompts > available:
        raise ValueError(
            f"num_prompts is {num_prompts}, but the environment has {available} prompts, and each counts once: give at "
            "most this number"
        )
    if sampling.by is not None and isinstance(task, PromptList):
        _group_of(task.prompt(0).columns, sampling.by)  # raises now, not after the episodes
    return dataclasses.replace(sampling, num_prompts=num_prompts)


def _sample_prompts(env: VectorEnv, player: Policy, sampling: Sampling, seed: int) -> EvaluationResult:
    """Play each prompt with the most probable tokens, and several times with sampled ones."""
    assert isinstance(env, TextVectorEnv)
    assert sampling.num_prompts is not None
    num_prompts = sampling.num_prompts
    num_samples = sampling.num_samples

    # The same seed gives the same prompts in the same order
    greedy_rollout = collect(env, player, num_episodes=num_prompts, seed=seed, deterministic=True)
    greedy_returns = _scored_returns(greedy_rollout)
    if sampling.by is not None:
        for turn in env.scored_turns.turns:
            _group_of(turn.prompt.columns, sampling.by)  # raises before the samples are played
    rollout = collect(env, player, num_episodes=num_prompts * num_samples, group_size=num_samples, seed=seed)
    returns = _scored_returns(rollout)

    # Episodes without a score
    num_unscored = int(np.isnan(returns).sum() + np.isnan(greedy_returns).sum())
    if num_unscored:
        logger.warning(
            "%d of %d episodes have no score: they count as not passed, and are left out of the mean return",
            num_unscored,
            len(returns) + len(greedy_returns),
        )

    # Answers and columns
    turns: list[list[Turn]] = [[] for _ in returns]
    for turn, episode in zip(env.scored_turns.turns, env.scored_turns.episodes, strict=True):
        turns[episode].append(turn)
    answers = _answers(turns, sampling, env)
    prompts = []
    for index, greedy_return in enumerate(greedy_returns.tolist()):
        rows = slice(index * num_samples, (index + 1) * num_samples)
        group = None
        if sampling.by is not None:
            first_turns = [turns_of_episode[0] for turns_of_episode in turns[rows] if turns_of_episode]
            if first_turns:  # there is none of a program that never asked
                group = _group_of(first_turns[0].prompt.columns, sampling.by)
        answers_of_prompt = None
        if answers is not None:
            answers_of_prompt = answers[rows]
        prompts.append(PromptSamples(returns[rows], greedy_return, answers_of_prompt, group))

    result = EvaluationResult(returns[~np.isnan(returns)].tolist(), rollout)
    result.pass_rates = pass_rates(prompts, sampling)
    return result


def _scored_returns(rollout: TensorDict) -> np.ndarray:
    """Return the return of each episode of text, float64 ``[episodes]``; NaN if it has no score."""
    rollout = join_episodes(rollout)
    has_score = (rollout["terminated"] | rollout["truncated"]).any(dim=1).cpu().numpy()
    returns = rollout["reward"].cpu().numpy().astype(np.float64).sum(axis=1)
    return np.where(has_score, returns, np.nan)


def _answers(turns: list[list[Turn]], sampling: Sampling, env: TextVectorEnv) -> list[Hashable | None] | None:
    """Return the answer of each episode, for the vote; None if episodes may have several turns, without a function."""
    read_answer = sampling.answer
    if read_answer is None:
        if env.limits.max_turns > 1:
            return None
        read_answer = getattr(env.task, "extract", None) or str.strip  # only some tasks have one
    answers: list[Hashable | None] = []
    for turns_of_episode in turns:
        if not turns_of_episode:  # a program that never asked
            answers.append(None)
            continue
        completion = turns_of_episode[-1].completion
        answer = read_answer(completion)
        if answer is not None and not _is_hashable(answer):
            raise TypeError(
                f"the answer to vote on is {answer!r:.100} for {completion!r:.100}, expected a text, a number, or None"
            )
        answers.append(answer)
    return answers


def _group_of(columns: Mapping[str, object], by: str) -> Hashable:
    """Return a prompt's value of the column; raise a ValueError if it has none that can be compared."""
    if by not in columns:
        names = ", ".join(map(repr, columns)) or "none"
        raise ValueError(f"by is {by!r:.100}, expected a column of the prompts, which have {names:.300}")
    value = columns[by]
    if not _is_hashable(value):
        raise ValueError(f"by is {by!r:.100}, whose value {value!r:.100} is no number or text: choose another column")
    return value


def _is_hashable(value: object) -> bool:
    """Whether a value can be counted; a tuple may hold what cannot."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _vector_env(env: object, policy: Policy, num_slots: int) -> VectorEnv:
    """Return a vector environment as it is; make one of a single environment or of an id."""
    check_policy(policy, call="evaluate(env, policy), in this order")
    if isinstance(env, str):
        slots = min(num_slots, NUM_SLOTS)
        if takes_model(env):
            return make_vector_environment(env, slots, split="test")
        return make_vector_environment(env, slots)
    if isinstance(env, gymnasium.Env):
        if isinstance(env.unwrapped, TextEnv):
            return _text_vector_env(env, env.unwrapped)
        return SyncVectorEnv([lambda: env])
    if not isinstance(env, VectorEnv):
        raise TypeError(f"env is {env!r:.100}, expected an environment, a vector environment or a Gymnasium id")
    return env


def _share_slots(one: VectorEnv, other: VectorEnv) -> bool:
    """Whether two control environments are the same below their wrappers, or have a slot in common."""
    if one.unwrapped is other.unwrapped:
        return True
    slots = [slot.unwrapped for slot in getattr(one.unwrapped, "envs", ())]  # those of this process
    other_slots = [slot.unwrapped for slot in getattr(other.unwrapped, "envs", ())]
    return any(slot is other_slot for slot in slots for other_slot in other_slots)


def _text_vector_env(env: gymnasium.Env, text_env: TextEnv) -> VectorEnv:
    """Return the vector environment inside a text environment, or raise if a wrapper would have no effect."""
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        if not isinstance(layer, (OrderEnforcing, PassiveEnvChecker)):  # `gymnasium.make` adds these two
            raise ValueError(
                f"{type(layer).__name__} wraps a text environment, which is played in whole episodes, so that the "
                "wrapper would see none of its steps: pass the unwrapped one"
            )
        layer = layer.env
    return text_env.vector


def summarise(
    env: VectorEnv | gymnasium.Env | str,
    policy: Policy,
    *,
    penalty: KLPenalty | None = None,
    num_episodes: int | None = None,
    deterministic: bool = False,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> dict[str, float]:
    """Evaluate a policy and return the results as numbers.

    Args:
        env: as in `evaluate`.
        policy: the policy to evaluate.
        penalty: KL penalty to measure; None means the environment's own, if any.
        num_episodes, deterministic, seed: as in `evaluate`.
        sampling: how each prompt is sampled several times (`read_sampling`); None: it is not.

    Returns:
        The numbers of `numbers_of`.
    """
    start = time.perf_counter()
    options: dict[str, Any] = {} if sampling is None else dict(vars(sampling))
    result = evaluate(env, policy, num_episodes=num_episodes, deterministic=deterministic, seed=seed, **options)
    seconds = time.perf_counter() - start
    return numbers_of(result, env, policy, penalty=penalty, seconds=seconds)


def numbers_of(
    result: EvaluationResult,
    env: VectorEnv | gymnasium.Env | str,
    policy: Policy,
    *,
    penalty: KLPenalty | None = None,
    seconds: float,
) -> dict[str, float]:
    """Return the results of an evaluation as numbers.

    Args:
        result: what `evaluate` returned for this environment and policy.
        env: as in `evaluate`.
        policy: the policy that was evaluated.
        penalty: KL penalty to measure; None means the environment's own, if any.
        seconds: what the evaluation took.

    Returns:
        ``mean_return`` and ``std_return`` as paid by the environment, ``episodes``, ``steps``, ``seconds``. With a
        penalty also ``score`` (equal to ``mean_return``, without KL), ``kl`` in nats per episode, ``penalised_return``.
        With pass rates also those of `PassRates.numbers`, such as ``pass@8``.
    """
    rollout = result.rollout
    numbers = {
        "mean_return": result.mean_return,
        "std_return": result.std_return,
        "episodes": len(result.returns),
        "steps": int(rollout["mask"].sum()),
        "seconds": seconds,
    }
    if result.pass_rates is not None:
        numbers |= result.pass_rates.numbers()

    # KL to the reference, measured after the clock has stopped
    if penalty is None and is_episode_env(env):
        penalty = env.penalty
    if penalty is None:
        return numbers
    parts = []
    for rows in rollout.split(ROWS_OF_KL):
        part = rows.to(policy.device)
        penalty(part, policy)
        parts.append(part)
    kl = reference_metrics(TensorDict.cat(parts), coefficient=penalty.coef)["reference/kl"]
    numbers["score"] = result.mean_return
    numbers["kl"] = kl
    numbers["penalised_return"] = result.mean_return - penalty.coef * kl
    return numbers


class EvaluateEvery(Callback):
    """Evaluates the policy during the training, keeps the best agent, and may end the training.

    The results of `summarise` are logged as ``eval/mean_return`` and so on. The agent with the best ``mean_return`` is
    saved in the folder ``best`` of the run. Rewards with a state, such as `textenv.rewards.Normalize`, use the state of
    the training and do not change it. On a CPU, the training has the same bits as without this callback.

    Args:
        env: an environment of its own (text: held-out prompts, as a rule), as in `evaluate`. Control environments of
            the training are refused: each evaluation would reset them.
        every: steps between evaluations; the last iteration is evaluated too.
        num_episodes: episodes of an evaluation, by default 20; not with ``k``.
        deterministic: take the most probable action instead of a sample, as is usual for SAC; not with ``k``.
        stop_at: end the training at this ``mean_return``.
        patience: end the training after this number of evaluations in a row without a better one.
        seed: seed of every evaluation, so that all have the same start states or prompts.
        k, num_samples, num_prompts, by, success, answer: several samples of each prompt, as in `evaluate`; logged as
            ``eval/pass@8``, ``eval/maj@8``, ``eval/greedy``, and ``eval/level=2/pass@8`` for a value of the column.
    """

    @check_names
    def __init__(
        self,
        env: VectorEnv | gymnasium.Env | str,
        every: int,
        *,
        num_episodes: int | None = None,
        deterministic: bool = False,
        stop_at: float | None = None,
        patience: int | None = None,
        seed: int = 0,
        k: int | Sequence[int] | None = None,
        num_samples: int | None = None,
        num_prompts: int | None = None,
        by: str | None = None,
        success: float = 1.0,
        answer: Answer | None = None,
    ) -> None:
        # Refuse numbers that mean nothing or do not fit each other
        for name, count in (("every", every), ("num_episodes", num_episodes), ("patience", patience)):
            if count is None:
                continue
            if not isinstance(count, SupportsFloat) or not count >= 1 or not float(count).is_integer():
                raise ValueError(f"{name} is {count!r}, expected a whole number, at least 1")
        if stop_at is not None and not (isinstance(stop_at, SupportsFloat) and math.isfinite(stop_at)):
            raise ValueError(f"stop_at is {stop_at!r}, expected a mean return, or None")
        self.sampling = read_sampling(
            k, num_samples=num_samples, num_prompts=num_prompts, by=by, success=success, answer=answer
        )
        _num_episodes(num_episodes, self.sampling)  # raises if both are given
        _check_deterministic(deterministic, self.sampling)

        # What is evaluated, and how
        self.env = env
        self.every = every
        self.num_episodes = num_episodes
        self.deterministic = deterministic
        self.seed = seed
        self.stop_at = stop_at
        self.patience = patience

        # What the evaluations of this training have shown
        self.best: float | None = None
        """Best ``mean_return`` so far."""
        self.best_steps: int | None = 0
        """Steps at the best evaluation; None if an earlier version has not saved them."""
        self.waited = 0
        """Evaluations since the best one."""
        self.evaluated = 0
        """Steps at the last evaluation."""
        self._is_restored = False
        """Whether these come from the checkpoint of a training that is resumed."""

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`; raises as `evaluate` does. A training that is not resumed begins anew."""
        if not self._is_restored:
            self.best = None
            self.best_steps = 0
            self.waited = 0
            self.evaluated = 0
        elif self.best is not None:
            self._bring_best_agent(run)
        self._is_restored = False

        # What another one would write over
        num_evaluations = sum(isinstance(callback, EvaluateEvery) for callback in run.callbacks)
        if num_evaluations > 1:
            raise ValueError(
                f"callbacks has {num_evaluations} EvaluateEvery, which would log the same names (eval/...) and save "
                f"into the same folder ({BEST}): give one, and call algos.evaluate for other environments in a "
                "callback of your own"
            )

        # The environment
        num_slots = self.num_episodes or DEFAULT_EPISODES
        self.env = _vector_env(self.env, run.agent.policy, num_slots)
        check_spaces(self.env, run.agent.policy)
        if not is_episode_env(self.env) and _share_slots(self.env, run.agent.env):
            raise ValueError(
                "env is the environment of the training, which every evaluation would reset, so that the training "
                "would play the same episodes again and again: make another one for EvaluateEvery, or give its id"
            )
        if self.sampling is not None:
            fit_sampling(self.sampling, self.env)  # raises now, not at the first evaluation

    def _bring_best_agent(self, run: Run) -> None:
        """Copy the best agent so far from the folder of the run that is continued; warn if it is in neither folder."""
        if run.run_dir is None or run.resumed_from is None or self.best_steps is None:
            return
        here = run.run_dir / BEST
        there = run.resumed_from / BEST
        if agent_steps(here) == self.best_steps:
            return
        if agent_steps(there) == self.best_steps:
            with replacing(here) as draft:
                shutil.copytree(there, draft)
            return
        logger.warning(
            "the best agent so far (%.4g, after %s steps) is not in %s any more, which has that of a training that is "
            "continued elsewhere or replaced, or none: the next better one is saved there",
            self.best,
            f"{self.best_steps:,}",
            here,
        )

    def on_iteration(self, run: Run, metrics: Metrics) -> bool:
        """See `Callback.on_iteration`."""
        is_due = run.steps // self.every != self.evaluated // self.every
        if not is_due and run.steps < run.total_steps:
            return False
        agent = run.agent
        self.evaluated = run.steps

        # Evaluate and log; rewards with a state use that of the training
        share_objects(agent.env, self.env)
        penalty = agent.penalty if is_episode_env(self.env) else None
        results = summarise(
            self.env,
            agent.policy,
            penalty=penalty,
            num_episodes=self.num_episodes,
            deterministic=self.deterministic,
            seed=self.seed,
            sampling=self.sampling,
        )
        for name, value in results.items():
            if name != "seconds":
                metrics[f"eval/{name}"] = value

        # Save the best agent
        mean_return = results["mean_return"]
        self.waited += 1
        has_score = not math.isnan(mean_return)
        if has_score and (self.best is None or mean_return > self.best):
            self.best = mean_return
            self.best_steps = run.steps
            self.waited = 0
            if run.run_dir is not None:
                agent.save(run.run_dir / BEST)

        # End the training
        if self.stop_at is not None and mean_return >= self.stop_at:
            return True
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, object]:
        """See `Callback.state_dict`."""
        return {
            "best": self.best,
            "best_steps": self.best_steps,
            "waited": self.waited,
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self.best = state["best"]
        self.best_steps = state.get("best_steps")  # earlier versions saved none
        self.waited = state["waited"]
        self.evaluated = state["evaluated"]
        self._is_restored = True
