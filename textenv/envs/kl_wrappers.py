"""KL penalty applied at each step, for agents that step one environment through the plain Gymnasium interface."""

from typing import SupportsFloat, TypedDict

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from textenv.envs.episode_batch import Info
from textenv.envs.text_env import TextEnv
from textenv.envs.vector_env import TextObservation
from textenv.kl.estimators import Estimator, choose_estimator
from textenv.lm.decoding import Decoder
from textenv.lm.loading import check_same_vocabulary
from textenv.lm.model import LanguageModel
from textenv.lm.sampling import restrict
from textenv.lm.seq2seq import Seq2SeqDecoder
from textenv.names import check_names


class TokenAndLogProb(TypedDict):
    """Action of `KLReward`."""

    token: np.int64
    log_prob: SupportsFloat
    """Log-probability of the token under the policy, nats."""


class _ReferenceWrapper(gymnasium.Wrapper):
    """Text environment whose actions are scored by a reference model, which decodes with a cache of its own."""

    def __init__(self, env: gymnasium.Env, reference: LanguageModel, coef: float) -> None:
        super().__init__(env)
        text_env = env.unwrapped
        if not isinstance(text_env, TextEnv):
            raise TypeError(f"{type(self).__name__} wraps a TextEnv, not {type(text_env).__name__}")
        if text_env.vector.penalty is not None:
            raise ValueError(
                "this environment already has a KLPenalty, so the KL would be subtracted twice: "
                "remove the penalty or the wrapper"
            )
        if not coef >= 0:
            raise ValueError(f"coef is {coef}, expected a number of at least 0 (reward per nat)")
        check_same_vocabulary(text_env.vector.tokenizer, reference.tokenizer)
        self.reference = reference
        self.coef = coef
        self._text_env = text_env
        decoder_class = Decoder if reference.seq2seq is None else Seq2SeqDecoder
        self._decoder = decoder_class(reference, num_slots=1, max_length=text_env.max_length)

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[TextObservation, Info]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._decoder.reset()
        self._observation = observation
        return observation, info

    def _score_and_step(self, token: np.int64) -> tuple[TextObservation, float, bool, bool, Info, float]:
        """Step; return what `step` returns, and log π_ref(token | prefix) of the reference."""
        prefix = self._observation
        allowed = self._text_env.vector.action_mask
        observation, reward, terminated, truncated, info = self.env.step(token)
        logits = self._decoder.logits(prefix["tokens"][None], prefix["length"])  # [1, n]
        logits = restrict(logits, temperature=self.reference.temperature, allowed=allowed)
        log_prob = logits.log_softmax(-1)[0, int(token)].item()
        self._observation = observation
        return observation, float(reward), terminated, truncated, info, log_prob


class KLReward(_ReferenceWrapper):
    """Wrapper that subtracts β·KL from the reward at each step.

    The reward depends on the policy's log-probability, which is thus part of the action:
    ``Dict(token=Discrete(n), log_prob=Box(-inf, 0))``. ``info`` has ``kl`` and ``reference_log_prob``.

    Args:
        env: a `TextEnv`, possibly wrapped, without a `KLPenalty` of its own.
        reference: the reference model, with the policy's temperature.
        coef: β ≥ 0, reward per nat.
        estimator: as in `textenv.kl.penalty.KLPenalty`, except the exact KL, which needs the probabilities of all
            actions.

    Example:
        >>> env = KLReward(gymnasium.make("textenv/Reviews-v0"), reference, 0.1)  # doctest: +SKIP
        >>> env.step({"token": 7, "log_prob": -1.3})  # doctest: +SKIP
    """

    @check_names
    def __init__(
        self, env: gymnasium.Env, reference: LanguageModel, coef: float, estimator: str | Estimator = "k1"
    ) -> None:
        super().__init__(env, reference, coef)
        self.estimator, function = choose_estimator(estimator, place="reward")
        if function is None:
            raise ValueError(f"estimator is {estimator!r}, but a step has the log-probability of one action: use 'k1'")
        self._estimator = function
        log_prob_space = spaces.Box(-np.inf, 0.0, (), np.float32)
        self.action_space = spaces.Dict(token=env.action_space, log_prob=log_prob_space)

    def step(self, action: TokenAndLogProb) -> tuple[TextObservation, SupportsFloat, bool, bool, Info]:
        """Append ``action["token"]``, chosen with ``action["log_prob"]`` (nats).

        Raises:
            ValueError: if the action is not such a dictionary, or the log-probability is above 0 or not finite.
        """
        if not isinstance(action, dict) or set(action) != {"token", "log_prob"}:
            raise ValueError(f"action is {action!r}, expected {{'token': int, 'log_prob': float}}")
        log_prob = float(action["log_prob"])
        if not -np.inf < log_prob <= 1e-6:
            raise ValueError(f"log_prob is {log_prob}, expected a finite log-probability of at most 0")

        observation, reward, terminated, truncated, info, reference_log_prob = self._score_and_step(action["token"])
        log_ratio = torch.tensor(log_prob - reference_log_prob, device="cpu")
        kl = float(self._estimator(log_ratio))
        info = info | {"kl": kl, "reference_log_prob": reference_log_prob}
        return observation, reward - self.coef * kl, terminated, truncated, info


class ReferenceReward(_ReferenceWrapper):
    """Wrapper that adds β·log π_ref(a|s) to each reward, for agents with no KL penalty (Stable-Baselines3, CleanRL).

    Since E[r - β·KL(π‖π_ref)] = E[r + β·log π_ref] + β·H(π), an agent with entropy bonus β maximises the penalised
    return. For one-step episodes this is exact if the agent rescales neither rewards nor advantages (in
    Stable-Baselines3: ``normalize_advantage=False``). For longer episodes it is an approximation: an entropy bonus in
    the loss rewards the entropy of the current state only and is not part of the returns. So the agent ignores the
    entropy of later states when it chooses an action.

    Args:
        env: a `TextEnv`, possibly wrapped, without a `KLPenalty` of its own.
        reference: the reference model, with the policy's temperature.
        coef: β ≥ 0, reward per nat; the agent's entropy coefficient must equal it.
    """

    def step(self, action: np.int64) -> tuple[TextObservation, SupportsFloat, bool, bool, Info]:
        """Append a token; ``info`` has ``reference_log_prob``."""
        observation, reward, terminated, truncated, info, log_prob = self._score_and_step(action)
        info = info | {"reference_log_prob": log_prob}
        return observation, reward + self.coef * log_prob, terminated, truncated, info
