"""``algos train``: train, save and evaluate."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import tyro

from algos import presets
from algos.cli.arguments import ModelCommand, json_object, named, one_thread, options
from algos.config import CONFIGS, AlgorithmName, Config, field_values
from algos.make import PROMPTS, READY_MODELS, is_text
from algos.policies.registry import PolicyName
from algos.storage.run_folder import RUN, check_new, mark_as_own, run_folder_of
from textenv.importing import absolute_name, read_module

AnyConfig = TypeVar("AnyConfig", bound=Config)
OF_POLICY = ("temperature", "lora", "critic", "dtype", "autocast", "gradient_checkpointing")
"""Options of text environments that `LMPolicy.load` takes."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options for textenv/Prompts-v0, the environment of one's own prompts and rewards."""

    prompts: str | None = None
    """Your prompts: .jsonl, .csv, .tsv, .parquet, or a folder of datasets. ENV may then be left out."""
    reward: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Your reward function, rewards.py:function or package.module:function, or with a weight rewards.py:function=0.5;
    repeat the flag for several."""
    eval_prompts: str | None = None
    """File of prompts to evaluate on; without it, about a quarter of the prompts is held out."""
    prompt_column: str = "prompt"
    """Name of the prompt's column."""
    system_prompt: str | None = None
    """System message of every prompt; text prompts become chats, by the model's chat template."""
    chat: bool = False
    """Make each text prompt the user's message of a chat, by the model's chat template."""
    overlong: Literal["error", "skip"] = "error"
    """With --max-prompt-tokens: an error if a prompt is longer, or skip, which leaves such prompts out."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options for text environments."""

    model: str = "embedded"
    """Text only: embedded, smollm2, a folder written by save_pretrained, a GGUF file, or a hub name."""
    kl_coef: float | None = None
    """Text only: reward charged per nat of KL to the initial model; 0 only measures the KL, None leaves it out."""
    max_kl: float | None = None
    """Text only: end the training when the KL exceeds this number of nats per episode."""
    max_prompt_tokens: int | None = None
    """Text only: maximum length of a prompt; default: the environment's (your own prompts: their longest)."""
    max_new_tokens: int | None = None
    """Text only: maximum length of a completion; default: the environment's (your own prompts: 128)."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text only: text or special token that ends a turn, in addition to those of the model itself (EOS, the ids of its
    generation_config, its chat template's end of a message); repeat the flag for several."""
    temperature: float | None = None
    """Text only: temperature of sampling and scoring; default 1, or that of a saved policy."""
    lora: str | None = None
    """Text only: train an adapter of this form instead of all weights: r=16,alpha=32,targets=q_proj+v_proj (r=16 is
    enough: alpha is 32, and targets are all linear layers)."""
    critic: str | None = None
    """Text only: where values come from: head (on the model, the default), copy (of the model), or a reward model."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Text only: dtype of the weights."""
    autocast: bool = False
    """Text only: compute in bfloat16, with weights in their own dtype."""
    gradient_checkpointing: bool = False
    """Text only: recompute activations in the backward pass instead of keeping them."""
    generator: Literal["vllm"] | None = None
    """Text only: vllm lets vLLM generate the rollouts (docs/runs.md); None: the policy itself."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options for what happens besides the training."""

    logger: str | None = None
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, trackio; several are separated by commas."""
    sample_every: int = 10
    """Iterations between tables of what the policy writes (samples.jsonl); 0 records none."""
    eval_every: int | None = None
    """Steps between evaluations on the test split or a fresh environment; the best agent is kept in best/."""
    eval_num_episodes: int = 20
    """Episodes of each of these evaluations."""
    stop_at: float | None = None
    """End the training when an evaluation reaches this mean return."""
    patience: int | None = None
    """End the training after this number of evaluations without a better one."""
    dynamics_every: int = 0
    """Iterations between measurements of the training's own dynamics, such as dead units and plasticity (dynamics/...
    in the log, see docs/insight.md); 0 measures none."""
    quiet: bool = False
    """Do not show the progress of the training."""


@dataclass(frozen=True, kw_only=True)
class Train(WatchOptions, TextOptions, PromptOptions, ModelCommand, Generic[AnyConfig]):
    """Train on an environment, write metrics and the agent to a run folder, and evaluate it.

    --config FILE reads options from a .toml or .yaml file, hyper-parameters under config; flags replace them. Each run
    writes such a file, run.yaml, which repeats it.
    """

    env: tyro.conf.Positional[str]
    """Gymnasium id, such as CartPole-v1 or textenv/Reviews-v0; module:id first imports the module that registers it.
    It may be left out with --prompts."""
    algo: AlgorithmName = "ppo"
    """Algorithm; the options --config.NAME are its hyper-parameters."""
    total_steps: int = 500_000
    """Steps to train for: actions in control, sampled tokens in text."""
    num_envs: int = 8
    """Number of environment slots."""
    run_dir: Path | None = None
    """Folder for metrics, samples and the agent; default runs/ENV-ALGO-SEED."""
    policy: PolicyName = "auto"
    """Control only; auto means cnn for images, else mlp, and q for DQN. For lstm, --config.minibatch-size is a number
    of slots; see presets.CARTPOLE_LSTM. gsde has state-dependent noise, for Box actions."""
    policy_kwargs: str = "{}"
    """Further arguments of the policy as a JSON object, such as '{"normalize_observations": true}'."""
    device: str | None = None
    """Device of all models: auto (the GPU, if there is one), cpu, cuda, cuda:1 or mps; None is the CPU."""
    shard: bool = False
    """Several processes (torchrun): share the weights among them while they train (FSDP2), for large models."""
    env_kwargs: str = "{}"
    """Further arguments of the environment as a JSON object, such as '{"dataset": "chain_sum"}'."""
    wrapper: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Control only: function that wraps each environment, package.module:function or file.py:function, such as
    minigrid.wrappers:ImgObsWrapper; repeat the flag for several, the innermost first."""
    process_timeout: float | None = None
    """Control only, for slow or unstable environments: run each in its own process, which is replaced if it crashes or
    if a step takes longer than this number of seconds (60 suits most)."""
    workers: str | None = None
    """Number of processes in which Ray collects rollouts; or ray://HOST:PORT, as many as that cluster has CPUs."""
    staleness: int = 0
    """Updates by which workers may be late, to go on during these; needs --config.max-importance-weight 2."""
    num_episodes: int = 20
    """Episodes of the evaluation after training (text: prompts of the test split)."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; default a tenth of the training. Ctrl-C, SIGTERM and SIGHUP write one before training
    ends."""
    resume: Path | None = None
    """Run folder or checkpoint to resume, with the options that started the run. With ENV and all options,
    the same command also starts the run, if there is no checkpoint yet."""
    overwrite: bool = False
    """Remove the run that is in the folder; without this option, a folder with a run is an error. With --resume,
    replace what the folder holds that was trained for longer than the checkpoint."""
    config: AnyConfig
    """Hyper-parameters; the defaults shown are those of the environment's preset."""

    def run(self) -> dict[str, Any] | None:
        """Train, save and evaluate; the resolved options are stored in the run's folder. None if it is another's."""
        return self._located()._train()

    def recipe(self) -> presets.Recipe:
        """Check the options and return what they train, with absolute paths."""
        return self._located()._recipe()

    def _train(self) -> dict[str, Any] | None:
        start, run_dir, rank, slots = time.perf_counter(), self.folder, 0, self.num_envs
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            from algos.ranks import collectives

            collectives.start()
            rank, slots = collectives.rank(), collectives.local_count(slots, "--num-envs")
        self._check_place(rank)
        recipe = dataclasses.replace(self._recipe(), num_envs=slots)
        slots = self.num_episodes if self.eval_every is None else max(self.num_episodes, self.eval_num_episodes)
        slots = min(slots, 64 if self.process_timeout is None else self.num_envs)
        with closing(recipe.environment()) as env, closing(recipe.environment(slots, split="test")) as test_env:
            one_thread()
            from algos.agent import check_environment
            from algos.evaluation import EvaluateEvery, summarise
            from algos.lab.insight.dynamics import Dynamics
            from algos.storage.env_state import share_objects
            from algos.training.callbacks import StopAtKL
            from algos.training.run import Callback
            from algos.training.signals import interrupted_by_signals
            from textenv.rewards.training import training

            agent = recipe.build(self.config.seed, env=env)
            check_environment(test_env, agent.policy, agent.config)  # its prompts may be longer
            known = self._described(agent.config)

            class StoreOptions(Callback):
                """Stores the options when the run starts: one that cannot start or resume changes nothing."""

                def on_start(self, run: Any) -> None:
                    (run_dir / RUN).write_text(known, encoding="utf-8")
                    mark_as_own(run_dir)

            callbacks: list[Any] = [StoreOptions(), *([] if self.max_kl is None else [StopAtKL(self.max_kl)])]
            callbacks += [Dynamics(self.dynamics_every)] if self.dynamics_every else []
            if self.eval_every is not None:
                wanted: Any = {"num_episodes": self.eval_num_episodes, "patience": self.patience}
                callbacks.append(EvaluateEvery(test_env, self.eval_every, stop_at=self.stop_at, **wanted))
            with self._collecting(agent, recipe), _options_outlive_their_folder(run_dir / RUN, known):
                history = agent.learn(
                    self.total_steps,
                    run_dir=run_dir,
                    progress=not (self.json or self.quiet),
                    callbacks=callbacks,
                    loggers=self.logger.split(",") if self.logger else [],
                    sample_every=self.sample_every,
                    checkpoint_every=self.checkpoint_every,
                    resume=self.resume,
                    overwrite=self.overwrite,
                )
            if rank:
                return None
            options: dict[str, Any] = {"num_episodes": self.num_episodes, "seed": self.config.seed}
            share_objects(agent.env, test_env)
            saved = f"in the evaluation after the training, whose agent is saved in {run_dir}: algos evaluate {run_dir}"
            with interrupted_by_signals(saved), training(int(history[-1]["steps"]), 1.0):  # the end of a curriculum
                result: dict[str, Any] = dict(summarise(test_env, agent.policy, penalty=agent.penalty, **options))
        if self.eval_every is not None:
            result |= {"best_mean_return": callbacks[-1].best, "best": str(run_dir / "best")}
        seconds = time.perf_counter() - start
        return result | {"steps": history[-1]["steps"], "seconds": seconds, "run_dir": str(run_dir)}

    def _check_place(self, rank: int) -> None:
        """Raise an error if there is another run in the folder, or less memory than the weights need."""
        here = self.resume is not None and run_folder_of(self.resume) == self.folder.resolve()
        if not here and not rank:  # the first process may have made the folder already
            check_new(self.folder, overwrite=self.overwrite)
        if is_text(self.env):
            from algos.lab.memory_plan import check_fits

            check_fits(self)

    def _collecting(self, agent: Any, recipe: presets.Recipe) -> AbstractContextManager[None]:
        if self.workers is None and not self.staleness:
            return nullcontext()
        from algos.extras.ray_workers import rollout_workers

        make = dataclasses.replace(recipe, kl_coef=None, device=None).environment  # the penalty is charged here
        return rollout_workers(agent, make, str(self.workers), staleness=self.staleness)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.run_dir or Path("runs") / f"{self.env.replace('/', '-')}-{self.algo}-{self.config.seed}"

    def _located(self) -> Self:
        """Check the options and return the same command with absolute paths, which are valid in every folder."""
        self._check()
        return dataclasses.replace(
            self,
            run_dir=self.folder.absolute(),
            model=self.model if self.model in READY_MODELS else absolute_name(self.model),
            critic={"head": None, "copy": "copy", None: None}.get(self.critic, absolute_name(str(self.critic))),
            reward=tuple(map(absolute_name, self.reward)),
            wrapper=tuple(map(absolute_name, self.wrapper)),
            prompts=self.prompts and absolute_name(self.prompts),
            eval_prompts=self.eval_prompts and absolute_name(self.eval_prompts),
        )

    def _check(self) -> None:
        """Raise a ValueError for options that do not fit each other or the environment."""
        for name in ("num_envs", "num_episodes", "eval_num_episodes", "checkpoint_every", "eval_every", "patience"):
            if (count := field_values(self)[name]) is not None and count < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {count}, expected at least 1")
        if self.shard and self.algo in ("trpo", "dqn"):
            raise ValueError(f"--shard is for several processes, but {self.algo} trains in one: use ppo")
        if self.eval_every is None and (self.stop_at, self.patience) != (None, None):
            raise ValueError("--stop-at and --patience are for evaluations while training: add --eval-every STEPS")
        own_prompts = self.env.rpartition(":")[2] == PROMPTS
        for kind, fits, what in (
            (TextOptions, is_text(self.env), "text environments"),
            (PromptOptions, own_prompts, f"prompts of your own ({PROMPTS}, or no ENV)"),
        ):
            if (given := self._given(kind)) and not fits:
                flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
                raise ValueError(f"{flags}: only for {what}, not for {self.env}; leave out what does not fit")
        if self.max_kl is not None and (self.kl_coef is None or self.max_kl <= 0):
            both = f"--max-kl is {self.max_kl} and --kl-coef {self.kl_coef}"
            raise ValueError(f"{both}, expected nats above 0 and a number")

    def _given(self, kind: type) -> dict[str, Any]:
        """Return the options of a kind that differ from their defaults."""
        own = field_values(self)
        return {field.name: own[field.name] for field in fields(kind) if own[field.name] != field.default}

    def _recipe(self) -> presets.Recipe:
        given = self._given(TextOptions) | ({"autocast": "bfloat16"} if self.autocast else {})
        policy = {name: x for name, x in given.items() if name in OF_POLICY}
        of_env = ("max_prompt_tokens", "max_new_tokens", "stop")
        env = self._given(PromptOptions) | {name: x for name, x in given.items() if name in of_env}
        every: dict[str, Any] = {"process_timeout": self.process_timeout, "wrappers": self.wrapper}
        known = {field.name for field in fields(presets.Recipe)}
        own = {name: value for name, value in field_values(self).items() if name in known}
        own["policy_kwargs"] = json_object(self.policy_kwargs, "--policy-kwargs") | policy
        own["env_kwargs"] = every | json_object(self.env_kwargs, "--env-kwargs") | env
        return presets.Recipe(**own, algorithm=self.algo)

    def _described(self, config: Config) -> str:
        """YAML of the options that repeat the run, with the agent's resolved config."""
        import yaml

        of_start = ("run_dir", "resume", "overwrite", "config")
        own = {name: value for name, value in field_values(self).items() if name not in of_start}
        own |= {name: json_object(own[name], name) for name in ("policy_kwargs", "env_kwargs")}
        settings = field_values(config)
        stored = {"env": self.env} | own | {"seed": settings.pop("seed"), "config": settings}
        return yaml.safe_dump(json.loads(json.dumps(stored)), sort_keys=False)  # JSON has lists for tuples


@contextmanager
def _options_outlive_their_folder(path: Path, text: str) -> Iterator[None]:
    """Write the options of a run again, if its folder was removed or moved while it trained."""
    from algos.training.loop import FolderLostError

    try:
        yield
    except FolderLostError:
        path.write_text(text, encoding="utf-8")
        raise


def train_command(arguments: Sequence[str], name: str = "train", kind: Any = Train) -> Any:
    """Build a command such as ``train`` with the defaults of environment and algorithm, or of the LSTM policy."""
    arguments = arguments if arguments[:1] == [name] else [name]
    algorithm, policy = named(arguments, "--algo", "ppo"), named(arguments, "--policy", "auto")
    env_id, _ = options(arguments, switches())
    if ":" in env_id:
        with suppress(ValueError):  # raised again when the environment is made
            read_module(env_id.rpartition(":")[0])
    recurrent = policy == "lstm" and algorithm == "ppo"
    model = named(arguments, "--model", "embedded")
    recipe = presets.RECURRENT if recurrent else presets.recipe(env_id, algorithm, model)
    own = field_values(recipe)
    given = {name: own[name] for name in ("total_steps", "num_envs", "policy", "kl_coef", "config")}
    given |= {name: json.dumps(dict(own[name])) for name in ("policy_kwargs", "env_kwargs")}
    default = kind(env=tyro.MISSING, algo=algorithm, **given)
    return Annotated[kind[type(recipe.config)], tyro.conf.subcommand(name, default=default)]


def switches() -> set[str]:
    """Return the names of the options of ``train`` that take no value."""
    kinds: list[tuple[str, Any]] = [("", Train), *(("config.", kind) for kind in CONFIGS.values())]
    found = {prefix + field.name for prefix, kind in kinds for field in fields(kind) if field.type in (bool, "bool")}
    return {name.replace("_", "-") for name in found}
