"""The learning loop: collect, penalise, update, log, save. It is here once, for every algorithm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from algos.collection import autoreset_mode
from algos.config import PolicyGradientConfig
from algos.flattening import flat_shape
from algos.frontier import VARIETY, plot_frontier
from algos.interruption import noted_signals
from algos.invariants import InvariantError, check_finite, check_inert
from algos.logs import Logs
from algos.metrics import EpisodeMeter, reference_metrics
from algos.names import check_names
from algos.run import Run
from algos.run_folder import FAILED, checkpoints, hold, remove, run_of, starts_again
from algos.violations import write_violation
from textenv.rollout import is_episode_env

if TYPE_CHECKING:
    from algos.agent import Agent

Metrics = dict[str, float]


class Penalty(Protocol):
    """Charges a policy in the rewards of a rollout, or in the loss (`textenv.kl.KLPenalty`)."""

    @property
    def coefficient(self) -> float:
        """Reward per nat."""
        ...

    def __call__(self, rollout: TensorDict, policy: Any) -> None:
        """Add ``kl`` and ``reference_log_prob`` to the rollout; may subtract from its ``reward``."""
        ...

    def losses(self, part: TensorDict, *, log_prob: Tensor, policy: Any) -> dict[str, Tensor]:
        """What is added to the loss: terms by name, one number an entry; none if the reward was charged."""
        ...

    def update(self, rollout: TensorDict) -> None:
        """Adapt the coefficient, once the update that was charged with it is over."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What changes while training, for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        ...


@check_names
def learn(
    agent: Agent,
    total_steps: int,
    *,
    run_dir: str | Path | None = None,
    progress: bool = False,
    on_iteration: Callable[[Metrics], Any] | None = None,
    diagnose: Callable[[Agent, TensorDict], Metrics] | None = None,
    checkpoint_every: int | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
) -> list[Metrics]:
    """Train until that many steps (True entries) were taken; the iteration under way is finished.

    Args:
        agent: the algorithm.
        total_steps: at least 1.
        run_dir: folder for ``metrics.jsonl``, TensorBoard files and, at the end or at an error, the saved agent; for
            text also ``frontier.png``.
        progress: show a progress bar.
        on_iteration: called with the metrics of every iteration, to look at; training ends where it returns anything
            that is true.
        diagnose: called with the agent and each rollout once the update is over; what it returns is logged.
        checkpoint_every: steps after which a checkpoint is written to ``checkpoints/`` in the run's folder, and one at
            the end. Ctrl-C and SIGTERM then finish the iteration and write one before they end the training.
        resume: folder of a run, or of one of its checkpoints, to go on from: the rest of the training is the same, to
            the last bit on a CPU, as if it had never stopped (but for environments that `algos.env_state` cannot
            save). Agent and environment are made as they were for that run. Where this is ``run_dir`` and has no
            checkpoint and no agent yet, training starts at its beginning: so one call starts a run and goes on with it.
        overwrite: remove the run that is in ``run_dir`` first; without it such a folder is refused.

    Returns:
        The metrics of every iteration; ``steps`` counts the steps so far. ``episode/return`` is the mean of what
        the environment paid, over the episodes that ended; it is absent where none did.

    Raises:
        Interrupted: a KeyboardInterrupt, after a signal.
        FileNotFoundError: if there is no checkpoint to go on from.
        FileExistsError: if ``run_dir`` holds a run, unless that is gone on with or overwritten.
        BlockingIOError: if another process trains in ``run_dir``.
        OSError: if the disk is full or read-only; names the last good checkpoint.
        ValueError: if that is damaged, or of another agent.
        InvariantError: if what always holds does not (`algos.invariants`); the offending batch is then in the run's
            folder, in ``violation.safetensors``.
    """
    _check_lengths(total_steps, checkpoint_every, run_dir)
    if resume is not None and overwrite:
        raise ValueError("resume goes on with a run and overwrite removes one: give one of them")
    here = resume is not None and run_dir is not None and run_of(resume) == Path(run_dir).resolve()
    with hold(run_dir, goes_on=here, overwrite=overwrite):
        fresh = resume is None or (here and starts_again(resume))
        run = Run(agent) if resume is None or fresh else Run.from_checkpoint(agent, resume)
        logs = Logs(run_dir, total_steps=total_steps, progress=progress, before=run.history)
        with logs, _rescue(run, run_dir), noted_signals(on=checkpoint_every is not None) as request:
            start = time.perf_counter() - run.seconds
            while run.steps < total_steps:
                agent.progress = run.steps / total_steps
                metrics = iterate(agent, run.meters, diagnose)
                metrics = run.add(metrics, seconds=time.perf_counter() - start)
                logs.write(metrics)
                stop = on_iteration is not None and bool(on_iteration(metrics))
                over = stop or run.steps >= total_steps
                if checkpoint_every is not None and run_dir is not None:
                    run.checkpoint(run_dir, every=checkpoint_every, over=over, request=request)
                if over:
                    break
        if run_dir is not None:
            agent.save(run_dir)
            remove(Path(run_dir) / FAILED)
            if VARIETY in run.history[-1]:
                plot_frontier(run.history, Path(run_dir) / "frontier.png")
    return list(run.history)


def _check_lengths(total_steps: int, checkpoint_every: int | None, run_dir: str | Path | None) -> None:
    if not isinstance(total_steps, (int, float)) or not total_steps >= 1:
        raise ValueError(f"total_steps is {total_steps!r}, expected at least 1")
    if checkpoint_every is not None and (checkpoint_every < 1 or run_dir is None):
        raise ValueError(
            f"checkpoint_every is {checkpoint_every} and run_dir {run_dir}: give a number of steps, and a folder"
        )


@contextmanager
def _rescue(run: Run, run_dir: str | Path | None) -> Iterator[None]:
    """Where training ends by an error, keep what it has produced: the agent, answers not scored, a batch at fault."""
    try:
        yield
    except BaseException as error:  # Ctrl-C too
        when = {"iteration": len(run.history) + 1, "steps": run.steps}
        if isinstance(error, InvariantError):
            error.add_note(f"in iteration {when['iteration']}, after {when['steps']} steps")
        if run_dir is not None:
            try:
                _save_what_is_left(error, run, Path(run_dir), when)
            except OSError as failure:  # of a disk that is full, which may be the error itself
                error.add_note(f"not everything could be saved in {run_dir}: {failure}")
        raise


def _save_what_is_left(error: BaseException, run: Run, run_dir: Path, when: Mapping[str, int]) -> None:
    """Write the agent, the answers and the batch of an error, and say where they are."""
    if answers := getattr(error, "answers", None):
        path = run_dir / "unscored.jsonl"
        path.write_text("".join(json.dumps(answer, default=str) + "\n" for answer in answers), encoding="utf-8")
        error.add_note(f"the {len(answers)} answers that were not scored are in {path}")
    if isinstance(error, InvariantError) and error.batch is not None:
        path = write_violation(error, run_dir, **when)
        error.add_note(f"its batch is in {path}: safetensors.torch.load_file reads it")
    if not checkpoints(run_dir):
        (run_dir / FAILED).touch()
    run.agent.save(run_dir)
    error.add_note(f"the agent, as far as it was trained, is saved in {run_dir}")


def iterate(
    agent: Agent,
    meters: tuple[EpisodeMeter, EpisodeMeter],
    diagnose: Callable[[Agent, TensorDict], Metrics] | None = None,
) -> Metrics:
    """One turn of the loop; the meters take the returns before and after the penalty."""
    clock = [time.perf_counter()]
    rollout = agent.collect()
    metrics = {"rollout/steps": int(rollout["mask"].sum())} | _episode_metrics(meters[0], rollout)
    if is_episode_env(agent.env):
        metrics |= agent.env.figures
    if not metrics["rollout/steps"]:
        raise ValueError(
            f"nothing of this rollout counts: none of its {len(rollout)} rows has an entry to learn from. Did "
            "the reward leave out every answer, by None or by failing on it?"
        )
    rollout = rollout.to(next(agent.policy.parameters()).device)
    check_finite(rollout, "observation", "reward", "log_prob")
    clock.append(time.perf_counter())
    if agent.penalty is not None:
        agent.penalty(rollout, agent.policy)
        check_finite(rollout, "reward", "reference_log_prob", "kl")
        check_inert(rollout, "reference_log_prob", "kl")
        metrics |= reference_metrics(rollout, coefficient=agent.penalty.coefficient)
        metrics |= _episode_metrics(meters[1], rollout, "episode/penalised_return")
    clock.append(time.perf_counter())
    metrics |= agent.update(rollout)
    clock.append(time.perf_counter())
    if diagnose is not None:  # before the normaliser moves, which would count as a change of the policy
        metrics |= diagnose(agent, rollout)
    agent.policy.update_normalizer(rollout)
    if agent.penalty is not None:
        agent.penalty.update(rollout)
    return metrics | dict(zip(("time/collect", "time/penalty", "time/update"), np.diff(clock).tolist(), strict=True))


def _episode_metrics(meter: EpisodeMeter, rollout: TensorDict, name: str = "episode/return") -> Metrics:
    returns, lengths = meter.finished(rollout)
    if not returns:
        return {}
    metrics = {name: float(np.mean(returns))}
    return metrics if name != "episode/return" else metrics | {"episode/length": float(np.mean(lengths))}


def choose_penalty(env: Any, penalty: Penalty | None) -> Penalty | None:
    """The penalty given, else the one that the environment carries, else none."""
    return getattr(env, "penalty", None) if penalty is None else penalty


def check_environment(env: Any, policy: Any, config: Any) -> None:
    """Refuse environments that an agent cannot collect from, and policies and configs of another kind.

    Raises:
        TypeError: if it is no vector environment, or the policy is not of the kind that the algorithm trains.
        ValueError: if it charges the KL by itself or does not say its autoreset mode, if policy and environment count
            different actions, or if the config counts what the environment does not have.
    """
    if not isinstance(env, VectorEnv):
        raise TypeError(
            f"env is {env!r:.100}, expected a vector environment: make it by gymnasium.make_vec(id, num_envs=8)"
        )
    if isinstance(policy, (str, type)):
        raise TypeError(
            f"policy is {policy!r:.100}, expected one that acts, such as MLPPolicy(env.single_observation_space, "
            "env.single_action_space), or LMPolicy.load(name) for text"
        )
    space = env.single_action_space
    if isinstance(space, spaces.Dict) and "log_prob" in space.spaces:
        raise ValueError(
            "this environment charges the KL step by step (KLReward); our agents charge it in batches: "
            "use TextVectorEnv with KLPenalty, or the KL would be charged twice"
        )
    if is_episode_env(env.unwrapped) and not is_episode_env(env):
        raise ValueError(
            f"{type(env).__name__} wraps a text environment and hides its whole episodes: give the environment itself"
        )
    if not is_episode_env(env):
        autoreset_mode(env)
    observed = env.single_observation_space
    if isinstance(observed, spaces.Dict) and set(observed) == {"tokens", "length"} and not is_episode_env(env):
        raise ValueError(
            f"{type(env).__name__} steps text environments one by one: give a TextVectorEnv, or gymnasium.make_vec(id)"
        )
    check_spaces(env, policy)
    actions = getattr(policy, "num_actions", None)
    if isinstance(space, spaces.Discrete) and actions is not None and actions != space.n:
        raise ValueError(
            f"the policy chooses from {actions} actions, the environment has {space.n}: "
            "make both from the same tokenizer or space"
        )
    if getattr(policy, "trained_by_values", False) and isinstance(config, PolicyGradientConfig):
        raise TypeError(
            f"a {type(policy).__name__} acts on values and has no probabilities that a gradient could follow: train it "
            "by DQN, or take an MLPPolicy"
        )
    if getattr(policy, "sampling_only", False):
        raise ValueError(
            "the policy samples by top_k or top_p, which its log-probabilities while training do not know: ratios and "
            "KL would be wrong. Train with both None, and set them for generation afterwards."
        )
    if is_episode_env(env) and config.episodes is None:
        raise ValueError(
            f"config.steps is {config.steps}, but a text environment is collected in whole episodes: "
            "set steps=None and episodes, or start from algos.presets.TEXT"
        )


def check_spaces(env: VectorEnv, policy: Any) -> None:
    """Refuse a policy that was made for other observations or actions than the environment has.

    Raises:
        TypeError: on a control policy for text.
        ValueError: on spaces of all slots, or of another environment.
    """
    read, chosen = getattr(policy, "observation_space", None), getattr(policy, "action_space", None)
    if read is None or chosen is None:
        return
    name, single = type(policy).__name__, env.single_observation_space
    if is_episode_env(env):
        raise TypeError(f"a {name} cannot read text in whole episodes: take an algos.LMPolicy")
    batched = (read, env.observation_space, single), (chosen, env.action_space, env.single_action_space)
    if any(own == of_all and own != of_one for own, of_all, of_one in batched):
        raise ValueError(
            f"the {name} was made from the spaces of all {env.num_envs} slots ({read}, {chosen}): make it from "
            "env.single_observation_space and env.single_action_space"
        )
    if flat_shape(read, name) != flat_shape(single, name):
        raise ValueError(f"the {name} reads {read}, the environment shows {single}: make it from the same space")
    if not _same_actions(chosen, env.single_action_space):
        raise ValueError(
            f"the {name} chooses from {chosen}, the environment takes {env.single_action_space}: make it from the same "
            "space"
        )


def _same_actions(one: spaces.Space, other: spaces.Space) -> bool:
    """Whether two spaces hold actions of one kind; limits of a Box are not saved with a policy."""
    both = isinstance(one, spaces.Box) and isinstance(other, spaces.Box)
    return one.shape == other.shape if both else one == other
