"""Adapters in both directions: Gymnasium environments as a torchrl `EnvBase`, and an `EnvBase` as a vector environment.

`to_torchrl` is torchrl's `GymWrapper`, with integer actions and the action mask. `from_torchrl` is written here, since
torchrl has no adapter to `gymnasium.vector`. Import this module only where torchrl is used: the import is slow.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase
from torchrl import data
from torchrl.data import Categorical, Composite, OneHot, TensorSpec
from torchrl.envs import ActionMask, EnvBase, GymWrapper, TransformedEnv
from torchrl.envs.gym_like import BaseInfoDictReader


def to_torchrl(env: gymnasium.Env | VectorEnv) -> EnvBase:
    """Convert a Gymnasium environment to torchrl, batch size ``[]``, or ``[num_envs]`` for a vector environment.

    A Discrete action is an integer, never one-hot (which takes 402 kB per action for GPT-2's vocabulary). For batch
    size B, ``action`` is int64 ``[*B]``; float32 ``reward`` and bool ``done``, ``terminated``, ``truncated`` are
    ``[*B, 1]``; for text, ``tokens`` is ``[*B, max_length]`` and ``length`` ``[1]`` or ``[N]``. An ``action_mask`` in
    ``info`` becomes an entry, bool ``[*B, n]``, and masks the action spec; the environment is reset here once to detect
    it. As in torchrl, ``set_seed`` resets, so the next ``reset`` starts the seed's second episode.

    Raises:
        TypeError: if it is not a Gymnasium environment.
        ValueError: if a vector environment has autoreset, or there is an action mask for a space other than Discrete.

    Example:
        >>> to_torchrl(gymnasium.make("CartPole-v1")).rollout(3)["action"].dtype
        torch.int64
    """
    if not isinstance(env, (gymnasium.Env, VectorEnv)):
        raise TypeError(f"env is {env!r}, expected a gymnasium.Env or VectorEnv: make it with gymnasium.make(id)")
    mode = getattr(env, "autoreset_mode", None)
    if isinstance(env, VectorEnv) and mode is not AutoresetMode.DISABLED:
        raise ValueError(
            f"autoreset_mode is {mode}, expected AutoresetMode.DISABLED, because torchrl resets by itself: make the "
            "vector environment with autoreset_mode=AutoresetMode.DISABLED, and pass it without wrappers"
        )
    wrapped = GymWrapper(env, categorical_action_encoding=True)
    if "action_mask" not in env.reset()[1]:
        return wrapped
    if not isinstance(wrapped.action_spec, Categorical):
        raise ValueError(f"info has an action_mask, but the action space is {env.action_space}, expected Discrete")
    wrapped.set_info_dict_reader(_ActionMaskReader(wrapped.action_spec))
    return TransformedEnv(wrapped, ActionMask())


class TorchRLVectorEnv(VectorEnv[object, np.ndarray, np.ndarray]):
    """A torchrl environment as a Gymnasium vector environment: batch size ``[N]`` is N slots, ``[]`` is one.

    As in torchrl, autoreset is DISABLED: ``reset(options={"reset_mask": bool [N]})`` sets ``_reset``.
    Categorical and OneHot specs become Discrete, Bounded and Unbounded Box, Binary MultiBinary. One
    observation entry is the observation; several are a Dict keyed by name. An entry ``action_mask`` goes to
    ``info["action_mask"]``, int8 ``[N, n]``. A seed calls torchrl's ``set_seed(seed)``, followed by a reset.

    Args:
        env: torchrl environment, on any device.
        observation: the only entry to return; None returns all.

    Raises:
        TypeError: if it is not a torchrl environment, or an entry has no Gymnasium space.
        ValueError: on several agents, actions or rewards, two batch dimensions, or slots whose bounds differ.

    Example:
        >>> env = from_torchrl(GymWrapper(gymnasium.make("CartPole-v1")))
        >>> env.single_action_space, env.reset(seed=1)[0].shape
        (Discrete(2), (1, 4))
    """

    def __init__(self, env: EnvBase, observation: str | None = None) -> None:
        _check_single_agent(env)
        self.env = env
        self.num_envs = env.batch_size.numel()
        self.autoreset_mode = AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": self.autoreset_mode}
        batch_dims = len(env.batch_size)
        self.single_action_space = _space("action", env.action_spec, batch_dims)

        # Entries that make the observation
        self._specs = dict(env.observation_spec.items())
        is_discrete = isinstance(self.single_action_space, spaces.Discrete)
        self._has_action_mask = is_discrete and "action_mask" in self._specs
        if self._has_action_mask:
            del self._specs["action_mask"]
        if observation is not None:
            if observation not in self._specs:
                raise ValueError(f"observation is {observation!r}, expected one of {', '.join(self._specs)}")
            self._specs = {observation: self._specs[observation]}

        # Spaces; a single entry is the observation itself
        entry_spaces = {name: _space(name, spec, batch_dims) for name, spec in self._specs.items()}
        self.single_observation_space: spaces.Space = spaces.Dict(entry_spaces)
        if len(entry_spaces) == 1:
            (self.single_observation_space,) = entry_spaces.values()
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

        self._ended = np.ones(self.num_envs, dtype=bool)
        self._current: TensorDictBase | None = None  # passed back to torchrl, which may keep no state itself

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[object, dict[str, np.ndarray]]:
        """Start new episodes in all or some slots; ValueError on a wrong mask, or a partial mask with a seed."""
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=bool))
        self._check_reset_mask(mask)
        if seed is not None and not mask.all():
            raise ValueError(f"seed is {seed} and reset_mask is {mask}: torchrl seeds all slots at once; pass only one")

        super().reset(seed=seed)
        if seed is not None:
            self.env.set_seed(seed)
        if self._current is None or mask.all():
            self._current = self.env.reset()
        else:
            done_shape = self.env.full_done_spec["done"].shape
            reset = torch.from_numpy(mask.copy()).reshape(done_shape).to(self.env.device)
            request = self._current.copy().set("_reset", reset)
            self._current = self.env.reset(request, select_reset_only=True)
        self._ended = self._ended & ~mask
        return self._observe(self._current), self._info(self._current)

    def _check_reset_mask(self, mask: object) -> None:
        """Raise a ValueError unless a mask is bool ``[N]`` with at least one True."""
        description = repr(mask)
        if isinstance(mask, np.ndarray):
            if mask.dtype == bool and mask.shape == (self.num_envs,) and mask.any():
                return
            description = f"{mask.dtype} {mask.shape}"
        raise ValueError(
            f"reset_mask is {description}, expected a bool array of shape ({self.num_envs},) with at least one True"
        )

    def step(self, actions: np.ndarray) -> tuple[object, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Step every slot (actions ``[N, *]``); ValueError on wrong actions, or while a slot's episode is over.

        Returns:
            Observation (the last one where an episode ended); reward float32, terminated, truncated bool ``[N]``; info.
        """
        if self._current is None or self._ended.any():
            raise ValueError(
                f"slots {np.flatnonzero(self._ended).tolist()} have no running episode: call reset() at the start, "
                'and reset(options={"reset_mask": mask}) for slots whose episode is over'
            )
        # Act; the next step begins with what `step_mdp` returns
        request = self._current.copy().set(self.env.action_key, self._encode(actions))
        transition = self.env.step(request)
        following = transition["next"]
        self._current = self.env.step_mdp(transition)

        # Ends; a torchrl environment may say only that an episode is done
        done = self._column(following["done"])
        terminated = self._column(following["terminated"])
        truncated = done & ~terminated
        if "truncated" in following.keys():
            truncated |= self._column(following["truncated"])
        self._ended = terminated | truncated

        reward = self._column(following[self.env.reward_key]).astype(np.float32)
        return self._observe(following), reward, terminated, truncated, self._info(following)

    def close_extras(self, **kwargs: object) -> None:
        """Close the torchrl environment; a later step raises an error, from torchrl or from this class."""
        self._current = None
        if not self.env.is_closed:
            self.env.close()

    def _encode(self, actions: np.ndarray) -> torch.Tensor:
        """Return actions ``[N, *]`` as a tensor of torchrl's action spec; ValueError on a wrong shape or index."""
        spec = self.env.action_spec
        space = self.single_action_space
        array = np.asarray(actions)
        expected_shape = (self.num_envs, *(space.shape or ()))
        if array.shape != expected_shape:
            raise ValueError(f"actions have shape {array.shape}, expected {expected_shape}: one action for each slot")
        if isinstance(space, spaces.Discrete) and not ((array >= 0) & (array < space.n)).all():
            raise ValueError(f"actions are {array.tolist()}, expected integers from 0 to {space.n - 1}")
        tensor = torch.as_tensor(array)
        if isinstance(spec, OneHot):
            tensor = torch.nn.functional.one_hot(tensor.long(), int(space.n))  # type: ignore[attr-defined]
        return tensor.to(self.env.device, spec.dtype).reshape(spec.shape)

    def _observe(self, entries: TensorDictBase) -> object:
        """Return the observation of all slots, an array or a dictionary of arrays."""
        if len(self._specs) > 1:
            return self._array(self._specs, entries, self.single_observation_space)
        [(name, spec)] = self._specs.items()
        return self._array(spec, entries[name], self.single_observation_space)

    def _array(self, spec: Any, value: Any, space: spaces.Space) -> object:
        """Return a new array ``[N, *]`` of the space's dtype, or a dictionary of them."""
        if isinstance(space, spaces.Dict):
            return {name: self._array(spec[name], value[name], space[name]) for name in space}
        if isinstance(spec, OneHot):
            value = value.int().argmax(-1)
        return value.cpu().numpy().astype(space.dtype).reshape(self.num_envs, *(space.shape or ()))

    def _column(self, value: torch.Tensor) -> np.ndarray:
        """Return one number per slot as a new array ``[N]``."""
        return value.cpu().numpy().reshape(self.num_envs).copy()

    def _info(self, entries: TensorDictBase) -> dict[str, np.ndarray]:
        if not self._has_action_mask:
            return {}
        mask = entries["action_mask"].cpu().numpy().astype(np.int8)
        return {"action_mask": mask.reshape(self.num_envs, -1)}


from_torchrl = TorchRLVectorEnv
"""Convert a torchrl environment to a Gymnasium vector environment."""


class _ActionMaskReader(BaseInfoDictReader):
    """Read ``info["action_mask"]``; a slot without an entry (in a partial reset) keeps its previous mask."""

    def __init__(self, action_spec: Categorical) -> None:
        self._mask = torch.ones(*action_spec.shape, action_spec.n, dtype=torch.bool)
        spec = data.Binary(action_spec.n, shape=self._mask.shape, dtype=torch.bool)
        self._spec = Composite(action_mask=spec, shape=action_spec.shape)

    def __call__(self, info_dict: dict[str, object], tensordict: TensorDictBase) -> TensorDictBase:
        if "action_mask" in info_dict:
            mask = torch.as_tensor(info_dict["action_mask"]).bool()
            is_present = torch.as_tensor(info_dict.get("_action_mask", True)).unsqueeze(-1)  # by slot
            self._mask = torch.where(is_present, mask, self._mask)
        return tensordict.set("action_mask", self._mask.clone())

    @property
    def info_spec(self) -> Composite:
        return self._spec


def _space(name: str, spec: TensorSpec, batch_dims: int) -> spaces.Space:
    """Return the space of one slot, for a spec whose first ``batch_dims`` dimensions are the batch dimensions."""
    shape = tuple(spec.shape[batch_dims:])
    if isinstance(spec, Composite):
        return spaces.Dict({key: _space(f"{name}.{key}", inner, batch_dims) for key, inner in spec.items()})
    if type(spec) is data.Binary:  # a subclass of Categorical
        return spaces.MultiBinary(shape)
    is_index = type(spec) is Categorical and shape in ((), (1,))
    if is_index or (type(spec) is OneHot and len(shape) == 1):
        return spaces.Discrete(int(spec.space.n))
    if isinstance(spec, (data.Bounded, data.Unbounded)):
        return _box(name, spec, batch_dims)
    raise TypeError(
        f"entry {name!r} is {type(spec).__name__} of shape {list(spec.shape)}, which has no Gymnasium space here: "
        "expected Bounded, Unbounded, Binary, or one Categorical or OneHot; choose another entry, or transform it"
    )


def _box(name: str, spec: TensorSpec, batch_dims: int) -> spaces.Box:
    """Return the Box of one slot; ValueError if slots have different bounds."""
    low = spec.space.low.cpu().numpy()
    high = spec.space.high.cpu().numpy()
    dtype = low.dtype.type
    if batch_dims:
        if (low != low[:1]).any() or (high != high[:1]).any():
            raise ValueError(f"entry {name!r} has different bounds in different slots, expected the same in all")
        low = low[0]
        high = high[0]
    if isinstance(spec, data.Unbounded) and spec.dtype.is_floating_point:
        low = -np.inf  # torchrl uses the largest float as bound
        high = np.inf
    return spaces.Box(low, high, tuple(spec.shape[batch_dims:]), dtype)


def _check_single_agent(env: object) -> None:
    """Raise an error unless an environment has one agent per slot, with one action, one reward and one end."""
    if not isinstance(env, EnvBase):
        raise TypeError(f"env is {env!r}, expected a torchrl EnvBase: make it with torchrl.envs.GymEnv(id)")
    if len(env.batch_size) > 1 or not env.batch_size.numel():
        raise ValueError(f"batch_size is {list(env.batch_size)}, expected [] or [N]: slots have one dimension")

    done_keys = [key for key in env.done_keys if key not in ("terminated", "truncated")]
    keys_by_kind = {"action": env.action_keys, "reward": env.reward_keys, "done": done_keys}
    for kind, keys in keys_by_kind.items():
        if len(keys) != 1 or not isinstance(keys[0], str):
            raise ValueError(
                f"the {kind} entries are {list(keys)}, expected one at the top level: a slot is one agent with one "
                f"{kind}; move one agent's entries there with torchrl.envs.RenameTransform"
            )
    if env.reward_spec.shape.numel() != env.batch_size.numel():
        raise ValueError(
            f"the reward has shape {list(env.reward_spec.shape)} for batch size {list(env.batch_size)}, expected one "
            "number per slot: add up the objectives with torchrl.envs.LineariseRewards"
        )
