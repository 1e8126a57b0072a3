"""``algos train``: train, save and evaluate."""

import json
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from algos import presets
from algos.cli.arguments import (
    ARGUMENTS,
    ModelCommand,
    json_object,
    named,
    one_thread,
    place_of_environment,
    to_remember,
)
from algos.config import CONFIGS, AlgorithmName, Config
from algos.policies.registry import PolicyName
from algos.training.run_folder import check_new, run_of
from textenv.rewards.calling import read_module

AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True, kw_only=True)
class Train(ModelCommand, Generic[AnyConfig]):
    """Train on an environment, write metrics and the agent to a run folder, and evaluate it."""

    env: tyro.conf.Positional[str]
    """Gymnasium id, such as CartPole-v1 or textenv/Reviews-v0; module:id first imports the module that registers it."""
    algo: AlgorithmName = "ppo"
    """Algorithm; --config has its hyper-parameters."""
    total_steps: int = 500_000
    """Steps to train for: actions in control, sampled tokens in text."""
    num_envs: int = 8
    """Number of environment slots."""
    run_dir: Path | None = None
    """Folder for metrics, TensorBoard files and the agent; default runs/ENV-ALGO-SEED."""
    policy: PolicyName = "auto"
    """Control only; auto means cnn for images, else mlp, and q for DQN. For lstm, --config.minibatch-size is a number
    of slots; see presets.CARTPOLE_LSTM. gsde has state-dependent noise, for Box actions."""
    policy_kwargs: str = "{}"
    """Further arguments of the policy as a JSON object, such as '{"normalize_observations": true}'."""
    model: str = "embedded"
    """Text only: the embedded model, a folder written by save_pretrained, or a hub name."""
    env_kwargs: str = "{}"
    """Further arguments of the environment as a JSON object, such as '{"dataset": "chain_sum"}'."""
    process_timeout: float | None = None
    """Control only, for slow or unstable environments: run each in its own process, which is replaced if it crashes or
    if a step takes longer than this number of seconds (60 suits most)."""
    kl_coef: float | None = None
    """Text only: reward charged per nat of KL to the initial model; 0 only measures the KL, None leaves it out."""
    num_episodes: int = 20
    """Episodes of the evaluation after training (text: prompts of the test split)."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; default a tenth of the training. Ctrl-C and SIGTERM write one before training ends."""
    resume: Path | None = None
    """Run folder or checkpoint to resume, with the arguments that started the run. With ENV and all arguments,
    the same command also starts the run, if there is no checkpoint yet."""
    overwrite: bool = False
    """Remove the run that is in the folder; without this option, a folder with a run is an error."""
    config: AnyConfig
    """Hyper-parameters; the defaults shown are those of the environment's preset."""

    def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Train, save and evaluate; the arguments are stored for ``--resume``."""
        start = time.perf_counter()
        if self.num_envs < 1 or self.num_episodes < 1:  # checked before the training, not in the evaluation after it
            raise ValueError(
                f"--num-envs is {self.num_envs} and --num-episodes {self.num_episodes}, expected at least 1 of each"
            )
        run_dir = self.folder
        here = self.resume is not None and run_of(self.resume) == run_dir.resolve()
        if not here:
            check_new(run_dir, overwrite=self.overwrite)
        elif self.overwrite:
            raise ValueError("--resume continues the run that --overwrite would remove: give only one of them")
        recipe = self._recipe()
        env = recipe.environment()
        one_thread()
        from algos.evaluation import summarise

        agent = recipe.build(self.config.seed, env=env)
        known = json.dumps(to_remember(arguments, switches())) + "\n"

        def remember(metrics: dict[str, float]) -> None:
            """Store the arguments only after an iteration: a run that cannot start or resume changes nothing."""
            if not (run_dir / ARGUMENTS).is_file() or (run_dir / ARGUMENTS).read_text(encoding="utf-8") != known:
                (run_dir / ARGUMENTS).write_text(known, encoding="utf-8")

        history = agent.learn(
            self.total_steps,
            run_dir=run_dir,
            progress=not self.json,
            on_iteration=remember,
            checkpoint_every=max(1, self.total_steps // 10) if self.checkpoint_every is None else self.checkpoint_every,
            resume=self.resume,
            overwrite=self.overwrite,
        )
        env.close()
        slots = min(self.num_episodes, 64 if self.process_timeout is None else self.num_envs)
        with closing(recipe.environment(slots, split="test")) as test_env:
            result = summarise(test_env, agent.policy, num_episodes=self.num_episodes, seed=self.config.seed)
        seconds = time.perf_counter() - start
        return result | {"steps": history[-1]["steps"], "seconds": seconds, "run_dir": str(run_dir)}

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.run_dir or Path("runs") / f"{self.env.replace('/', '-')}-{self.algo}-{self.config.seed}"

    def _recipe(self) -> presets.Recipe:
        from algos.make import is_text

        if not is_text(self.env) and (self.model != "embedded" or self.kl_coef is not None):
            raise ValueError(f"--model and --kl-coef are for text environments, {self.env} is not one: omit them")
        return presets.Recipe(
            env=self.env,
            algorithm=self.algo,
            config=self.config,
            num_envs=self.num_envs,
            policy=self.policy,
            policy_kwargs=json_object(self.policy_kwargs, "--policy-kwargs"),
            env_kwargs={"process_timeout": self.process_timeout} | json_object(self.env_kwargs, "--env-kwargs"),
            model=self.model,
            kl_coef=self.kl_coef,
        )


def train_command(arguments: Sequence[str]) -> Any:
    """Build the ``train`` command with the defaults of the given environment and algorithm, or of the LSTM policy."""
    arguments = arguments if arguments[:1] == ["train"] else ["train"]
    algorithm, policy = named(arguments, "--algo", "ppo"), named(arguments, "--policy", "auto")
    at = place_of_environment(arguments, switches())
    env_id = "" if at is None else arguments[at]
    if ":" in env_id:
        with suppress(ValueError):  # raised again when the environment is made
            read_module(env_id.rpartition(":")[0])
    recurrent = policy == "lstm" and algorithm == "ppo"
    recipe = presets.RECURRENT if recurrent else presets.recipe(env_id, algorithm)
    default = Train(
        env=tyro.MISSING,
        algo=algorithm,  # type: ignore[arg-type]
        total_steps=recipe.total_steps,
        num_envs=recipe.num_envs,
        policy=recipe.policy,  # type: ignore[arg-type]
        policy_kwargs=json.dumps(dict(recipe.policy_kwargs)),
        kl_coef=recipe.kl_coef,
        config=recipe.config,
    )
    return Annotated[Train[type(recipe.config)], tyro.conf.subcommand("train", default=default)]  # type: ignore[misc]


def switches() -> set[str]:
    """Return the names of the options of ``train`` that take no value."""
    kinds: list[Any] = [Train, *CONFIGS.values()]
    return {field.name for kind in kinds for field in fields(kind) if field.type in (bool, "bool")}
