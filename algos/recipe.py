"""`Recipe`: the description of a run, as Python objects and as plain data in files.

The command line fills one, a preset is one, and `compare` trains one for each case. The plain form of a recipe has the
names of the options of ``algos train``, as ``run.yaml`` stores them. `compare` and `tune` compare plain forms to
recognize a run that they have trained before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import MethodType, NoneType
from typing import TYPE_CHECKING, Any, Literal

from algos.config import Config, PPOConfig, compares_groups, field_values, find_config
from algos.make import absolute_paths, find_algorithm, make_vector_environment, takes_model
from algos.policies.registry import make_policy
from algos.storage.run_files import RUN
from algos.storage.run_folder import is_own
from algos.storage.run_reader import check_kinds, read_options_file
from algos.storage.saved_environment import runs_code
from textenv.embedded.folder import EMBEDDED
from textenv.importing import absolute_name, load_function, name_of, read_module
from textenv.kl.coefficients import CoefficientLike, as_coefficient
from textenv.names import advice
from textenv.state import attributes_of

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from algos.agent import Agent
    from algos.policies.policy import Policy

logger = logging.getLogger(__name__)
GENERATORS = {"vllm": "algos.extras.vllm:VLLM"}
"""Classes of engines that generate text, by their name in a `Recipe`; they take a policy and an environment."""
POLICY_OPTIONS: dict[str, object] = {
    "temperature": None,
    "lora": None,
    "critic": None,
    "dtype": "float32",
    "autocast": False,
    "gradient_checkpointing": False,
}
"""Options of ``algos train`` that are arguments of the policy, with their defaults. A default is not passed on."""
ENV_OPTIONS: dict[str, object] = {
    "prompts": None,
    "reward": (),
    "eval_prompts": None,
    "prompt_column": "prompt",
    "system_prompt": None,
    "chat": False,
    "overlong": "error",
    "sampler": None,
    "max_prompt_tokens": None,
    "max_new_tokens": None,
    "stop": (),
    "process_timeout": None,
    "wrapper": (),
}
"""Options of ``algos train`` that are arguments of the environment, with their defaults. A default is not passed on."""
KINDS: dict[str, tuple[type, ...]] = {
    "env": (str, dict),
    "algo": (str, dict),
    "num_envs": (int,),
    "total_steps": (int,),
    "policy": (str, dict),
    "policy_kwargs": (dict,),
    "env_kwargs": (dict,),
    "model": (str,),
    "config": (dict, Config),
    "kl_coef": (int, float, dict, NoneType),
    "device": (str, NoneType),
    "shard": (bool,),
    "generator": (str, NoneType),
}
"""Types of the options that are fields of a recipe."""
OTHER_OPTIONS = {
    "seed", "workers", "staleness", "max_kl", "num_episodes", "k", "num_samples", "num_prompts", "by", "success",
    "answer", "eval_every", "eval_num_episodes", "stop_at", "patience", "logger", "sample_every", "checkpoint_every",
    "dynamics_every", "run_dir", "resume", "overwrite", "quiet", "json", "trust_remote_code",
}  # fmt: skip
"""Further options of ``algos train``: the seed, and how a run is collected, watched and stored."""
IMPORT = "import"
"""Key of plain data that stands for a Python object: ``{"import": "package.module:name"}``, see `_described`."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An environment, an algorithm, a policy and their settings: everything needed to build an agent."""

    env: str | Callable[[int], VectorEnv] = ""
    """Gymnasium id, ``module:id``, or a function of the number of slots."""
    algorithm: str | type[Agent[Any]] = "ppo"
    """Name of an algorithm, or a class of your own."""
    config: Config = PPOConfig()
    num_envs: int = 8
    total_steps: int = 500_000
    policy: str | Callable[[VectorEnv, int], Policy] = "auto"
    """A name of `algos.policies.registry`, or a function of environment and seed."""
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the policy, if it is given by name."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the environment, if it is given by id."""
    model: str = EMBEDDED
    """Name or folder of the language model, for text and for the policy ``words``; see `LMPolicy.load`."""
    kl_coef: CoefficientLike | None = None
    """Reward charged per nat of KL, see `Agent`. Each agent gets a copy of a coefficient that changes."""
    device: str | None = None
    """Device of the policy and the environment's models, see `textenv.device.find_device`. None: they stay where they
    are."""
    shard: bool = False
    """Share the weights among the processes of torchrun, see `algos.agent.Agent`."""
    generator: Literal["vllm"] | None = None
    """Engine that generates the rollouts (text only, `algos.policies.generator`). None: the policy itself."""

    def __post_init__(self) -> None:
        if self.generator is not None and self.generator not in GENERATORS:
            raise ValueError(f"generator is {self.generator!r:.100}, expected None or one of {', '.join(GENERATORS)}")

    def environment(self, num_envs: int | None = None, *, split: str = "train") -> VectorEnv:
        """Make the environment.

        With the prompts of the test split it has a KL penalty, by which an evaluation measures the KL. An environment
        to train in has none, because the agent that `build` makes has the penalty.

        Args:
            num_envs: slots; None is the recipe's number.
            split: prompts of a text environment of this kit, ``"train"`` or ``"test"``, which has no sampler.
        """
        slots = self.num_envs if num_envs is None else num_envs
        if callable(self.env):
            return self.env(slots)

        # Environments that are made for a language model take further arguments
        arguments: dict[str, Any] = {}
        kl_coef = None
        agent_has_penalty = split == "train" and self._agent_makes_penalty()
        if takes_model(self.env, self.env_kwargs):
            if self.kl_coef is not None:
                kl_coef = as_coefficient(self.kl_coef).value
            arguments["model"] = self.model
            arguments["kl_coef"] = None if agent_has_penalty else kl_coef
            if split != "train":
                arguments["split"] = split
        arguments.update(self.env_kwargs)
        if split != "train":
            arguments.pop("sampler", None)
        env = make_vector_environment(self.env, slots, seed_each=compares_groups(self.algorithm), **arguments)
        if agent_has_penalty:
            assert env.spec is not None
            env.spec.kwargs["kl_coef"] = kl_coef  # saved with the agent, as a sign that a KL is measured

        if self.device is not None:
            from textenv.device import find_device
            from textenv.rollout import is_episode_env  # loads torch; the error about a wrong id does not wait

            device = find_device(self.device)
            if device is not None and is_episode_env(env):
                env.to(device)
        return env

    def build(self, seed: int, *, env: VectorEnv | None = None) -> Agent[Any]:
        """Make the agent.

        Args:
            seed: seed of environment, weights, sampled actions and minibatch order.
            env: an environment that `environment` has made; None makes one.
        """
        from textenv.rollout import is_episode_env

        vector_env: Any = env
        if env is None:
            vector_env = self.environment()

        # Policy
        if callable(self.policy):
            policy = self.policy(vector_env, seed)
        else:
            # The default model is none of a control policy, unless that is asked for
            has_model = self.policy == "words" or self.model != EMBEDDED or is_episode_env(vector_env)
            model = self.model if has_model else None
            policy_kwargs = self._fitting_policy_kwargs(vector_env)
            policy = make_policy(vector_env, policy=self.policy, model=model, seed=seed, **policy_kwargs)

        # Options of the agent
        config = replace(self.config, seed=seed)
        options: dict[str, Any] = {}
        env_charges = is_episode_env(vector_env) and vector_env.penalty is not None
        if self.kl_coef is not None and not env_charges:
            options["kl_coef"] = self.kl_coef
        if self.shard:
            options["shard"] = True
        if self.generator is not None:
            from algos.policies.generator import check_generator

            check_generator(vector_env, policy, config)  # first, because an engine takes half a minute to start
            engine_type = resolve_name(GENERATORS[self.generator])
            options["generator"] = engine_type(policy, vector_env)
        agent_type = find_algorithm(self.algorithm)
        return agent_type(vector_env, policy, config, device=self.device, **options)

    def _fitting_policy_kwargs(self, env: VectorEnv) -> dict[str, Any]:
        """Return the arguments of the policy, for images without the normalization that other policies have.

        A preset for observations that are vectors has it, and a wrapper may show images instead.
        """
        from algos.envs.images import is_image  # loads torch

        policy_kwargs = dict(self.policy_kwargs)
        chooses_cnn = self.policy == "auto" and is_image(env.single_observation_space)
        if chooses_cnn and policy_kwargs.pop("normalize_observations", False):
            logger.warning("normalize_observations is left out: the observations are images, whose pixels are divided")
        return policy_kwargs

    def _agent_makes_penalty(self) -> bool:
        """Return True if the agent makes the KL penalty of one of our environments.

        The penalty then has the policy's dtype, and shares the policy's frozen weights (LoRA). If a function makes the
        policy, perhaps from another model, the environment makes the penalty, with ``model`` as the reference.
        """
        if callable(self.env) or callable(self.policy) or not takes_model(self.env, self.env_kwargs):
            return False
        return "kl_coef" not in self.env_kwargs and "penalty" not in self.env_kwargs

    def with_absolute_paths(self) -> Recipe:
        """Return the same recipe with absolute paths, because an environment may change the working folder."""
        model = absolute_paths({"model": self.model})["model"]
        policy_kwargs = dict(self.policy_kwargs)
        critic = policy_kwargs.get("critic")
        if isinstance(critic, (str, Path)) and critic != "copy":
            policy_kwargs["critic"] = absolute_name(str(critic))
        describe = policy_kwargs.get("describe")
        if isinstance(describe, str):
            policy_kwargs["describe"] = absolute_name(describe)
        return replace(self, model=model, policy_kwargs=policy_kwargs, env_kwargs=absolute_paths(self.env_kwargs))

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data, for JSON and YAML, under the names of the options of ``algos train``.

        Functions, classes and other objects become their names (and attributes), see `_described`; tuples become lists.
        The seed of the config is left out: `build` gets it.
        """
        # A config of the algorithm's own class is written as its values; any other as an object that is imported
        options = field_values(self)
        del options["config"]
        config: dict[str, Any] = field_values(self.config)
        del config["seed"]
        if type(self.config) is not find_config(self.algorithm):
            config = {IMPORT: _importable_name(type(self.config)), "state": config}
        options = {"env": options.pop("env"), "algo": options.pop("algorithm"), **options, "config": config}
        return json.loads(json.dumps(options, default=_described))

    @classmethod
    def from_dict(cls, options: Mapping[str, object], *, trusted: bool = False) -> Recipe:
        """Make a recipe from what `to_dict` returned, or from options of ``algos train``.

        Options that only say how a run is watched or stored, such as ``logger``, are left out. An option that is absent
        has the default of a `Recipe`, not that of the environment's preset, which only ``algos train`` looks up.

        Args:
            options: values by name; hyper-parameters under ``config``.
            trusted: True for data of your own: functions, modules of environments, rewards and wrappers that it names
                are imported and run.

        Raises:
            TypeError: if an option or a hyper-parameter is unknown.
            ValueError: if a value does not fit; or if something would be imported or run by data that is not trusted.
        """
        options = _with_underscores(options)
        known_options = {*KINDS, *POLICY_OPTIONS, *ENV_OPTIONS, *OTHER_OPTIONS}
        for name in options:
            if name not in known_options:
                raise TypeError(f"there is no option {name!r:.100} of a run; {advice(name, sorted(known_options))}")
        check_kinds(options, KINDS, "option ")
        if not trusted:
            _refuse_code(options)

        # What has the name of a field of the recipe
        arguments: dict[str, Any] = {}
        for recipe_field in fields(cls):
            if recipe_field.name in options:
                arguments[recipe_field.name] = _restored(options[recipe_field.name])
        algorithm: Any = _restored(options.get("algo", "ppo"))
        arguments["algorithm"] = algorithm

        # Hyper-parameters, of the class that the algorithm has
        config = arguments.get("config", {})
        if not isinstance(config, Config):
            values: dict[str, Any] = {name: _as_tuple(value) for name, value in _with_underscores(config).items()}
            if "seed" in options:
                values["seed"] = options["seed"]
            arguments["config"] = find_config(algorithm)(**values)

        # Options that are arguments of policy or environment
        policy_options = _changed(options, POLICY_OPTIONS)
        if policy_options.get("autocast") is True:
            policy_options["autocast"] = "bfloat16"
        if policy_options.get("critic") == "head":
            del policy_options["critic"]
        env_options = _changed(options, ENV_OPTIONS)
        if "wrapper" in env_options:
            env_options["wrappers"] = env_options.pop("wrapper")
        arguments["policy_kwargs"] = dict(arguments.get("policy_kwargs", {})) | policy_options
        arguments["env_kwargs"] = dict(arguments.get("env_kwargs", {})) | env_options
        return cls(**arguments)

    @classmethod
    def from_yaml(cls, path: str | Path, *, trusted: bool = False) -> Recipe:
        """Read a recipe from a file: ``run.yaml`` of a run, ``best.yaml`` of `tune`, or options of your own.

        Args:
            path: the file.
            trusted: see `from_dict`. The ``run.yaml`` of a run that you started yourself is always trusted.

        Raises:
            TypeError, ValueError: as `from_dict`, or if the file holds something else.
        """
        path = Path(path)
        is_of_own_run = path.name == RUN and is_own(path.parent)
        return cls.from_dict(read_options_file(path), trusted=trusted or is_of_own_run)


def _with_underscores(options: Mapping[str, object]) -> dict[str, object]:
    """Return options whose names are those of Python: a file may have ``num-envs`` too."""
    return {str(name).replace("-", "_"): value for name, value in options.items()}


def _changed(options: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    changed = {}
    for name, default in defaults.items():
        value = _as_tuple(options.get(name, default))
        if default == () and isinstance(value, str):
            value = (value,)
        if value != default and value is not None:
            changed[name] = value
    return changed


def _as_tuple(value: object) -> object:
    """Return a tuple for a list, as the command line and configs have it; other values as they are."""
    return tuple(value) if isinstance(value, list) else value


def _described(value: Any) -> Any:
    """Describe what JSON cannot hold.

    Returns:
        A list for a set, an array or a tensor, a text for a path. ``{"import": "module:name"}`` for a function or a
        class; with ``positional`` and ``arguments`` for a `functools.partial`; with ``self``, its object, for a method;
        with ``state``, the attributes, for an object of this class.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, partial):
        description = {IMPORT: _importable_name(value.func), "arguments": value.keywords}
        if value.args:
            description["positional"] = value.args
        return description
    if isinstance(value, MethodType) and not isinstance(value.__self__, type):
        return {IMPORT: _importable_name(value.__func__), "self": value.__self__}
    if hasattr(value, "__qualname__"):
        return {IMPORT: _importable_name(value)}
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, tensors
        return value.tolist()
    return {IMPORT: _importable_name(type(value)), "state": dict(attributes_of(value))}


def _importable_name(function: Callable[..., Any]) -> str:
    """Return ``package.module:name`` or ``file.py:name`` of a function or class; the name may have dots."""
    module, _, name = name_of(function).rpartition(":")
    name = getattr(function, "__qualname__", name)
    return f"{module}:{name}"


def _restored(value: Any) -> Any:
    """Return what `_described` has described, also inside lists and dictionaries; imports what they name."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if IMPORT not in value:
        return {name: _restored(item) for name, item in value.items()}

    # A function, a class, a partial, a method, or an object
    imported = _import(value[IMPORT])
    if "state" in value:
        state = _restored(value["state"])
        if is_dataclass(imported):
            return _dataclass_with(imported, state)
        instance = imported.__new__(imported)
        for name, attribute in state.items():
            object.__setattr__(instance, name, attribute)
        return instance
    if "self" in value:
        return MethodType(imported, _restored(value["self"]))
    if "arguments" in value:
        return partial(imported, *_restored(value.get("positional", [])), **_restored(value["arguments"]))
    return imported


def _dataclass_with(kind: Any, values: Mapping[str, object]) -> Any:
    """Make an instance of a dataclass by its constructor, which checks the values; lists become tuples."""
    names = [kind_field.name for kind_field in fields(kind) if kind_field.init and kind_field.name in values]
    return kind(**{name: _as_tuple(values[name]) for name in names})


def _import(name: object) -> Any:
    """Import a function or class by its `_importable_name`; raise a ValueError if it cannot be found."""
    module_name, _, qualified_name = str(name).rpartition(":")
    if not module_name or "<" in qualified_name:
        raise ValueError(f"{name!r:.200} cannot be imported: it is defined inside a function, or is no module:name")
    if module_name.endswith(".py"):
        return load_function(str(name))
    try:
        return attrgetter(qualified_name)(read_module(module_name))
    except AttributeError as error:
        raise ValueError(f"{name!r:.200} cannot be imported: {error}") from error


def _refuse_code(options: Mapping[str, object]) -> None:
    """Raise a ValueError if something would be imported or run by a recipe with these options."""
    refused = [name for name, value in options.items() if _has_code(name, value)]
    if refused:
        raise ValueError(
            f"these options would import or run code: {', '.join(refused):.200}. Give trusted=True, if nobody else can "
            "have written them"
        )


def _has_code(name: str, value: object) -> bool:
    """Return True if an option imports or runs something once its recipe is made or used."""
    if name == "env":
        return not isinstance(value, str) or ":" in value
    if name in ("logger", "workers", "answer"):  # no part of a recipe
        return False
    return _names_import(value) or runs_code(name, value)


def _names_import(value: object) -> bool:
    """Return True if `IMPORT` is a key of a value, or of one inside it."""
    if isinstance(value, dict):
        return IMPORT in value or any(map(_names_import, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_names_import, value))
