"""``algos train``: train, save and evaluate."""

import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Self, TypeVar

import tyro

from algos import presets
from algos.cli.arguments import Command, ModelCommand, WholeNumber, flag, json_object, named, one_thread, options
from algos.cli.pass_rates import PassRateOptions
from algos.cli.sample import check_model_name
from algos.config import CONFIGS, AlgorithmName, Config, field_values
from algos.make import PROMPTS, READY_MODELS, is_text
from algos.policies.registry import PolicyName
from algos.recipe import Recipe
from algos.statistics.pass_rates import Sampling, read_sampling
from algos.storage.run_files import BEST, RUN
from algos.storage.run_folder import check_new, mark_as_own, refuse_tilde, run_folder_of
from algos.storage.run_reader import options_text, read_options_file
from textenv.importing import absolute_name, read_module
from textenv.startup import load_torch

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from algos.agent import Agent
    from algos.evaluation import EvaluateEvery
    from algos.training.run import Callback, Run

logger = logging.getLogger(__name__)
AnyConfig = TypeVar("AnyConfig", bound=Config)

COUNT_OPTIONS = ("num_envs", "num_episodes", "eval_num_episodes", "checkpoint_every", "eval_every", "patience")
"""Options that are at least 1."""

KWARGS = ("policy_kwargs", "env_kwargs")
"""Options that are JSON objects."""
UNSTORED_OPTIONS = ("run_dir", "resume", "overwrite", "config")
"""Options of one start, which ``run.yaml`` does not repeat, and ``config``, which it has in its resolved form."""

UNTOLD_OPTIONS = ("config", "total_steps", "num_episodes", "checkpoint_every")
"""Options beside those of `WatchOptions`, `PassRateOptions` and `Command` that a resume may change without a word."""

MAX_TEST_ENVS = 64
"""Largest number of slots to evaluate in."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options for textenv/Prompts-v0, the environment of one's own prompts and rewards."""

    prompts: str | None = None
    """Your prompts: .jsonl, .csv, .tsv, .parquet, a folder of datasets, or a data set of the Hugging Face Hub,
    hf:owner/name:config/split. ENV may then be left out."""
    reward: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Your reward function, rewards.py:function or package.module:function, or with a weight rewards.py:function=0.5;
    repeat the flag for several."""
    eval_prompts: str | None = None
    """Prompts to evaluate on, such as hf:owner/name:config/test; without them, about a quarter of the prompts is held
    out."""
    prompt_column: str = "prompt"
    """Name of the prompt's column."""
    system_prompt: str | None = None
    """System message of every prompt; text prompts become chats, by the model's chat template."""
    chat: bool = False
    """Make each text prompt the user's message of a chat, by the model's chat template."""
    overlong: Literal["error", "skip"] = "error"
    """With --max-prompt-tokens: an error if a prompt is longer, or skip, which leaves such prompts out."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions:
    """Options for language models: in text environments, and in control with --policy words."""

    model: str = "embedded"
    """Language model: embedded, smollm2, a folder written by save_pretrained, a GGUF file, or a hub name. In control,
    naming one means --policy words."""
    kl_coef: float | None = None
    """Language models only: reward charged per nat of KL to the initial model; 0 only measures the KL, None leaves it
    out."""
    max_kl: float | None = None
    """Language models only: end the training when the KL exceeds this number of nats per episode."""
    temperature: float | None = None
    """Language models only: temperature of sampling and scoring; default 1, or that of a saved policy."""
    lora: str | None = None
    """Language models only: train an adapter of this form instead of all weights: r=16,alpha=32,targets=q_proj+v_proj
    (r=16 is enough: alpha is 32, and targets are all linear layers)."""
    critic: str | None = None
    """Language models only: where values come from: head (on the model, the default), copy (of the model), or a reward
    model."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Language models only: dtype of the weights; float16 with --lora only."""
    autocast: bool = False
    """Language models only: compute in bfloat16, with weights in their own dtype."""
    gradient_checkpointing: bool = False
    """Language models only: recompute activations in the backward pass instead of keeping them."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options for text environments."""

    max_prompt_tokens: int | None = None
    """Text only: maximum length of a prompt; default: the environment's (your own prompts: their longest)."""
    max_new_tokens: int | None = None
    """Text only: maximum length of a completion; default: the environment's (your own prompts: 128)."""
    sampler: str | None = None
    """Text only: which prompts come next: pass_rate (those that are sometimes solved), or curriculum:column=NAME (the
    easiest first), with arguments such as pass_rate:success=1,floor=.2 (docs/environments.md); None: each once before
    one repeats."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text only: text or special token that ends a turn, in addition to those of the model itself (EOS, the ids of its
    generation_config, its chat template's end of a message); repeat the flag for several."""
    generator: Literal["vllm"] | None = None
    """Text only: vllm lets vLLM generate the rollouts (docs/parallel.md); None: the policy itself."""


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
    """Episodes of each of these evaluations; not with --k."""
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
class Train(
    WatchOptions, PassRateOptions, TextOptions, LanguageModelOptions, PromptOptions, ModelCommand, Generic[AnyConfig]
):
    """Train on an environment, write metrics and the agent to a run folder, and evaluate it.

    --config FILE reads options from a .toml or .yaml file, hyper-parameters under config; flags replace them. Each run
    writes such a file, run.yaml, which repeats it.
    """

    env: tyro.conf.Positional[str]
    """Gymnasium id, such as CartPole-v1 or textenv/Reviews-v0; module:id first imports the module that registers it.
    It may be left out with --prompts."""
    algo: AlgorithmName = "ppo"
    """Algorithm; the options --config.NAME are its hyper-parameters."""
    total_steps: WholeNumber = 500_000
    """Steps to train for: actions in control, sampled tokens in text."""
    num_envs: int = 8
    """Number of environment slots."""
    run_dir: Path | None = None
    """Folder for metrics, samples and the agent; default runs/ENV-ALGO-SEED."""
    policy: PolicyName = "auto"
    """Control only; auto means cnn for images, else mlp, and for DQN, SAC and TD3 their own (q, sac, td3). words is a
    language model that reads a description of each observation, and is chosen if --model is given without --policy. For
    lstm, --config.minibatch-size is a number of slots; see presets.CARTPOLE_LSTM. gsde, and for SAC sac_gsde, have
    state-dependent noise, for Box actions."""
    policy_kwargs: str = "{}"
    """Further arguments of the policy as a JSON object, such as '{"normalize_observations": true}'; those of the preset
    stay, unless they are given, too."""
    device: str | None = None
    """Device of all models: auto (the GPU, if there is one), cpu, cuda, cuda:1 or mps; None is the CPU."""
    shard: bool = False
    """Several processes (torchrun): share the weights among them while they train (FSDP2), for large models."""
    env_kwargs: str = "{}"
    """Further arguments of the environment as a JSON object, such as '{"dataset": "chain_sum"}'; those of the preset
    stay, unless they are given, too."""
    wrapper: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Control only: function that wraps each environment, package.module:function or file.py:function, such as
    minigrid.wrappers:ImgObsWrapper; repeat the flag for several, the innermost first. They replace those of the
    preset."""
    process_timeout: float | None = None
    """Control only, for slow or unstable environments: run each in its own process, which is replaced if it crashes or
    if a step takes longer than this number of seconds (60 suits most)."""
    workers: str | None = None
    """Number of processes in which Ray collects rollouts; or ray://HOST:PORT, as many as that cluster has CPUs."""
    staleness: int = 0
    """Updates by which workers may be late, to go on during these; needs --config.max-importance-weight 2."""
    num_episodes: int = 20
    """Episodes of the evaluation after training (text: prompts of the test split); not with --k."""
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

    def run(self) -> dict[str, object] | None:
        """Train, save and evaluate; the resolved options are stored in the run's folder.

        Returns:
            Results of the evaluation, steps, seconds and folders; None in all processes but the first.
        """
        return self._with_absolute_paths()._train()

    def recipe(self) -> Recipe:
        """Check the options and return what they train, with absolute paths."""
        return self._with_absolute_paths()._build_recipe()

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        if self.run_dir is not None:
            return self.run_dir
        env_name = self.env.replace("/", "-")
        return Path("runs") / f"{env_name}-{self.algo}-{self.config.seed}"

    def _train(self) -> dict[str, object] | None:
        """Train, save and evaluate, once the options are checked and all paths are absolute."""
        start = time.perf_counter()

        # Several processes (torchrun) share the slots
        rank = 0
        num_envs = self.num_envs
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            load_torch()
            from algos.ranks import collectives

            collectives.start()
            rank = collectives.rank()
            num_envs = collectives.local_count(num_envs, "--num-envs")

        # Errors that can be raised before anything is loaded
        self._check_folder_and_memory(rank)
        recipe = dataclasses.replace(self._build_recipe(), num_envs=num_envs)

        num_test_envs = self._num_test_envs()
        with closing(recipe.environment()) as env, closing(recipe.environment(num_test_envs, split="test")) as test_env:
            one_thread()
            from algos.agent_setup import check_environment
            from algos.evaluation import fit_sampling

            sampling_arguments = self.sampling_arguments()
            sampling = read_sampling(**sampling_arguments)
            if sampling is not None:
                fit_sampling(sampling, test_env)  # raises now, not after the training
            agent = recipe.build(self.config.seed, env=env)
            check_environment(test_env, agent.policy, agent.config)  # its prompts may be longer

            # Train, and save the agent
            stored_options = self._stored_options(agent.config)
            evaluations = self._evaluations(test_env, sampling_arguments)
            callbacks = self._callbacks(stored_options)
            if evaluations is not None:
                callbacks.append(evaluations)
            with self._collection(agent, recipe), _options_outlive_their_folder(self.folder / RUN, stored_options):
                history = agent.learn(
                    self.total_steps,
                    run_dir=self.folder,
                    progress=not (self.json or self.quiet),
                    callbacks=callbacks,
                    loggers=self._loggers(),
                    sample_every=self.sample_every,
                    checkpoint_every=self.checkpoint_every,
                    resume=self.resume,
                    overwrite=self.overwrite,
                )
            if rank:
                return None
            steps = history[-1]["steps"]
            result: dict[str, object] = {**self._evaluate(agent, test_env, steps=int(steps), sampling=sampling)}

        if evaluations is not None:
            result["best_mean_return"] = evaluations.best
            result["best"] = None  # it was lost before a resume, and there was no better one
            if (self.folder / BEST).is_dir():
                result["best"] = str(self.folder / BEST)
        result["steps"] = steps
        result["seconds"] = time.perf_counter() - start
        result["run_dir"] = str(self.folder)
        return result

    def _check_folder_and_memory(self, rank: int) -> None:
        """Raise an error if there is another run in the folder, or less memory than the weights need."""
        resumes_in_place = self.resume is not None and run_folder_of(self.resume) == self.folder.resolve()
        if not resumes_in_place and not rank:  # the first process may have made the folder already
            check_new(self.folder, overwrite=self.overwrite)
        if self.is_text_run():
            load_torch()
            from algos.lab.memory_plan import check_fits

            check_fits(self)

    def _num_test_envs(self) -> int:
        """Return the number of slots to evaluate in: one per episode, up to a limit."""
        if self.k is not None:
            return MAX_TEST_ENVS
        num_episodes = self.num_episodes
        if self.eval_every is not None:
            num_episodes = max(num_episodes, self.eval_num_episodes)
        limit = MAX_TEST_ENVS
        if self.process_timeout is not None:  # each slot is a process
            limit = self.num_envs
        return min(num_episodes, limit)

    def _unless_sampled(self, num_episodes: int) -> int | None:
        """Return a number of episodes; None with ``--k``, which decides how many there are."""
        if self.k is not None:
            return None
        return num_episodes

    def _evaluations(self, test_env: "VectorEnv", sampling_arguments: dict[str, Any]) -> "EvaluateEvery | None":
        """Return the callback that evaluates during the training; None without --eval-every."""
        from algos.evaluation import EvaluateEvery

        if self.eval_every is None:
            return None
        return EvaluateEvery(
            test_env,
            self.eval_every,
            num_episodes=self._unless_sampled(self.eval_num_episodes),
            stop_at=self.stop_at,
            patience=self.patience,
            **sampling_arguments,
        )

    def _callbacks(self, stored_options: Mapping[str, object]) -> "list[Callback]":
        """Return the callbacks of the training, but that of `_evaluations`."""
        from algos.lab.insight.dynamics import Dynamics
        from algos.training.callbacks import StopAtKL
        from algos.training.run import Callback

        run_dir = self.folder
        resume = self.resume

        class StoreOptions(Callback):
            """Stores the options when the run starts: one that cannot start or go on changes nothing."""

            def on_start(self, run: "Run") -> None:
                if run.has_ended:
                    return
                if resume is not None and run.steps < run.total_steps:
                    _warn_of_other_options(run_folder_of(resume) / RUN, stored_options)
                (run_dir / RUN).write_text(options_text(stored_options), encoding="utf-8")
                mark_as_own(run_dir)

        # Callbacks that options ask for
        callbacks: list[Callback] = [StoreOptions()]
        if self.max_kl is not None:
            callbacks.append(StopAtKL(self.max_kl))
        if self.dynamics_every:
            callbacks.append(Dynamics(self.dynamics_every))
        return callbacks

    def _loggers(self) -> list[str]:
        """Return the names of --logger."""
        if not self.logger:
            return []
        return self.logger.split(",")

    def _collection(self, agent: "Agent[Any]", recipe: Recipe) -> AbstractContextManager[None]:
        """Return the context to train in: with Ray's workers if the options ask for them."""
        if self.workers is None and not self.staleness:
            return nullcontext()
        from algos.extras.ray_workers import rollout_workers

        # The penalty is charged in this process, not by the workers
        worker_recipe = dataclasses.replace(recipe, kl_coef=None, device=None)
        return rollout_workers(agent, worker_recipe.environment, str(self.workers), staleness=self.staleness)

    def _evaluate(
        self, agent: "Agent[Any]", test_env: "VectorEnv", *, steps: int, sampling: Sampling | None
    ) -> dict[str, float]:
        """Evaluate the agent after its training of ``steps`` steps, with the rewards as that has left them."""
        from algos.evaluation import summarise
        from algos.storage.env_state import share_objects
        from algos.training.signals import interrupted_by_signals
        from textenv.rewards.training import training

        share_objects(agent.env, test_env)
        run_dir = self.folder
        saved = f"in the evaluation after the training, whose agent is saved in {run_dir}: algos evaluate {run_dir}"
        with interrupted_by_signals(saved), training(steps, 1.0):  # the end of a curriculum
            return summarise(
                test_env,
                agent.policy,
                penalty=agent.penalty,
                num_episodes=self._unless_sampled(self.num_episodes),
                seed=self.config.seed,
                sampling=sampling,
            )

    def _with_absolute_paths(self) -> Self:
        """Check the options and return the same command with absolute paths, which are valid in every folder."""
        self._check()
        refuse_tilde("--run-dir", self.run_dir)
        model = self.model
        if model not in READY_MODELS:
            model = absolute_name(model)

        # "head" is the default, and "copy" no file
        critic = self.critic
        if critic == "head":
            critic = None
        elif critic != "copy":
            critic = _absolute_name_or_none(critic)

        return dataclasses.replace(
            self,
            run_dir=self.folder.absolute(),
            model=model,
            critic=critic,
            reward=tuple(map(absolute_name, self.reward)),
            wrapper=tuple(map(absolute_name, self.wrapper)),
            prompts=_absolute_name_or_none(self.prompts),
            answer=_absolute_name_or_none(self.answer),
            eval_prompts=_absolute_name_or_none(self.eval_prompts),
        )

    def is_text_run(self) -> bool:
        """Return True if the environment is one of text (`algos.make.is_text`)."""
        return is_text(self.env, json_object(self.env_kwargs, "--env-kwargs"))

    def _check(self) -> None:
        """Raise a ValueError for options that do not fit each other or the environment."""
        values = field_values(self)
        for name in COUNT_OPTIONS:
            count = values[name]
            if count is not None and count < 1:
                raise ValueError(f"{flag(name)} is {count}, expected at least 1")
        if self.shard and self.algo in ("trpo", "dqn", "sac", "td3"):
            raise ValueError(f"--shard is for several processes, but {self.algo} trains in one: use ppo")
        if self.eval_every is None and (self.stop_at, self.patience) != (None, None):
            raise ValueError("--stop-at and --patience are for evaluations while training: add --eval-every STEPS")

        # Evaluations
        if self.k is not None:
            for name in ("num_episodes", "eval_num_episodes"):
                if values[name] != getattr(type(self), name):
                    raise ValueError(
                        f"{flag(name)} is {values[name]}, but --k is given: say how many prompts by --num-prompts, "
                        "each of which is sampled --num-samples times"
                    )
        self.sampling_arguments()  # raises for those that do not fit

        # Options of text environments, of language models, and of one's own prompts
        if not self.is_text_run():
            self._refuse_options(TextOptions, "text environments")
            self._refuse_options(PassRateOptions, "text environments")
            if self.policy != "words":
                self._refuse_options(LanguageModelOptions, "language models (text environments, or --policy words)")
        if self.env.rpartition(":")[2] != PROMPTS:
            self._refuse_options(PromptOptions, f"prompts of your own ({PROMPTS}, or no ENV)")

        if self.max_kl is not None and (self.kl_coef is None or self.max_kl <= 0):
            both = f"--max-kl is {self.max_kl} and --kl-coef {self.kl_coef}"
            raise ValueError(f"{both}, expected nats above 0 and a number")
        self._check_model_names()

    def _check_model_names(self) -> None:
        """Refuse names of models that are misspelt paths, before the hub is asked for them; GGUF files are never."""
        if self.model not in READY_MODELS and not self.model.lower().endswith(".gguf"):
            check_model_name(self.model, may_lack_owner=True)
        if self.critic not in (None, "head", "copy"):
            check_model_name(str(self.critic), may_lack_owner=True)

    def _refuse_options(self, kind: type, purpose: str) -> None:
        """Raise a ValueError if an option of ``kind`` is set, since the environment does not serve its purpose."""
        values = field_values(self)
        names = [field.name for field in fields(kind) if values[field.name] != field.default]
        if names:
            flags = " and ".join(map(flag, names))
            raise ValueError(f"{flags}: only for {purpose}, not for {self.env}; leave out what does not fit")

    def _options(self) -> dict[str, Any]:
        """Return the options by name; those in JSON are parsed."""
        options = field_values(self)
        for name in KWARGS:
            options[name] = json_object(options[name], flag(name))
        return options

    def _build_recipe(self) -> Recipe:
        """Return what the options train."""
        return Recipe.from_dict(self._options(), trusted=True)

    def _stored_options(self, config: Config) -> dict[str, object]:
        """Return the options that repeat the run as plain data, with the agent's resolved config."""
        stored: dict[str, object] = {"env": self.env}
        for name, value in self._options().items():
            if name not in UNSTORED_OPTIONS:
                stored[name] = value

        # The seed is an option, beside the hyper-parameters
        hyper_parameters = field_values(config)
        stored["seed"] = hyper_parameters.pop("seed")
        stored["config"] = hyper_parameters
        plain: dict[str, object] = json.loads(json.dumps(stored))  # with lists for tuples
        return plain


def _absolute_name_or_none(name: str | None) -> str | None:
    """Return `absolute_name` of an option that may be None."""
    if name is None:
        return None
    return absolute_name(name)


def _warn_of_other_options(path: Path, options_of_training: Mapping[str, object]) -> None:
    """Log a warning that names the options of a training that are not those of the run that it resumes.

    Hyper-parameters are left out, which the training tells itself, and options that do not change what is learnt.

    Args:
        path: file with the options of the run; a run of a Python program has none.
        options_of_training: the options of the training.
    """
    if not path.is_file():
        return
    options_of_run = read_options_file(path)
    untold = set(UNTOLD_OPTIONS)
    for kind in (WatchOptions, PassRateOptions, Command):
        untold |= {field.name for field in fields(kind)}
    changes = []
    for name, value in options_of_training.items():
        if name not in untold and name in options_of_run and options_of_run[name] != value:
            changes.append(f"{flag(name)} {value} (before: {options_of_run[name]})")
    if changes:
        logger.warning("the run goes on with other options: %s", ", ".join(changes))


@contextmanager
def _options_outlive_their_folder(path: Path, stored_options: Mapping[str, object]) -> Iterator[None]:
    """Write the options of a run again, if its folder was removed or moved while it trained."""
    from algos.training.loop import FolderLostError

    try:
        yield
    except FolderLostError:
        path.write_text(options_text(stored_options), encoding="utf-8")
        raise


def train_command(arguments: Sequence[str], name: str = "train", kind: Any = Train) -> Any:
    """Return the type from which tyro makes a command, with the defaults of environment, algorithm and policy.

    Args:
        arguments: words of the command line; those of another command give the general defaults.
        name: name of the command.
        kind: `Train`, or a class derived from it.
    """
    if arguments[:1] != [name]:
        arguments = [name]
    recipe = _preset(arguments)
    preset = recipe.to_dict()
    defaults = {option: preset[option] for option in ("algo", "total_steps", "num_envs", "policy", "kl_coef")}
    for option in KWARGS:
        defaults[option] = json.dumps(preset[option])
    default = kind(env=tyro.MISSING, config=recipe.config, **defaults)
    return Annotated[kind[type(recipe.config)], tyro.conf.subcommand(name, default=default)]


def with_preset_arguments(arguments: list[str], typed: Sequence[str]) -> list[str]:
    """Return the words of ``train`` or ``plan`` with the preset's arguments beside those typed as JSON.

    Options of a file, and those of a run to resume, are complete as they are.

    Args:
        arguments: all words, see `with_files`.
        typed: words of the command line.
    """
    _, typed_options = options(typed, switches())
    names = [name for name in KWARGS if name.replace("_", "-") in typed_options]
    if arguments[:1] not in (["train"], ["plan"]) or not names or "resume" in typed_options:
        return arguments
    preset = _preset(arguments).to_dict()
    words = list(arguments)
    for name in names:
        with suppress(ValueError):  # raised again when the command is checked
            further = json_object(named(arguments, flag(name)), flag(name))
            words.append(f"{flag(name)}={json.dumps(preset[name] | further)}")
    return words


def _preset(arguments: Sequence[str]) -> Recipe:
    """Return the preset for the environment, algorithm, policy and model that words of the command line name."""
    algorithm = named(arguments, "--algo", "ppo")
    policy = named(arguments, "--policy", "auto")
    env_id, named_options = options(arguments, switches())
    model = named(arguments, "--model", "embedded")

    # The module registers the environment, and so says whether it is one of text
    module, _, _ = env_id.rpartition(":")
    if module:
        with suppress(ValueError):  # raised again when the environment is made
            read_module(module)

    # A language model that is named plays control too; every run.yaml names a policy
    env_kwargs: dict[str, object] = {}
    with suppress(ValueError):  # raised again when the command is checked
        env_kwargs = json_object(named(arguments, "--env-kwargs", "{}"), "--env-kwargs")
    if "model" in named_options and "policy" not in named_options and env_id and not is_text(env_id, env_kwargs):
        policy = "words"

    return presets.recipe(env_id, algorithm, model, policy=policy, env_kwargs=env_kwargs)


def switches() -> set[str]:
    """Return the names of the options of ``train`` that take no value."""
    names = set()
    kinds: list[tuple[str, type]] = [("", Train), *(("config.", config) for config in CONFIGS.values())]
    for prefix, kind in kinds:
        for field in fields(kind):
            if field.type in (bool, "bool"):
                option = field.name.replace("_", "-")
                names.add(f"{prefix}{option}")
    return names
