"""The command line: ``algos train|evaluate|compare|merge|check|check-reward``; also ``textenv``, ``python -m algos``.

Nothing here imports torch before it is known what is to be done: help and errors come at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from algos import presets
from algos.arguments import ARGUMENTS, named, place_of_environment, to_remember, with_remembered
from algos.comparison.compare import DEFAULT_CASES
from algos.config import CONFIGS, AlgorithmName, Config, PolicyName
from algos.names import nearest
from algos.training.run_folder import check_new, run_of
from algos.training.signals import Interrupted
from textenv.errors import InvariantError
from textenv.lm.loading import trust_remote_code
from textenv.rendering import printable
from textenv.rewards.calling import read_module

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True, kw_only=True)
class Train(Generic[ConfigT]):
    """Train on an environment, write metrics and the agent to a run folder, and evaluate it."""

    env: tyro.conf.Positional[str]
    """Gymnasium id, such as CartPole-v1 or textenv/Reviews-v0; module:id imports the module that registers it first."""
    algo: AlgorithmName = "ppo"
    """Algorithm; --config is its own."""
    seed: int | None = None
    """Of weights, environment, sampled actions and minibatches; the same as --config.seed."""
    total_steps: int = 500_000
    """Steps to train for: actions in control, chosen tokens in text."""
    num_envs: int = 8
    """Environment slots side by side."""
    run_dir: Path | None = None
    """Folder for metrics, TensorBoard files and the agent; default runs/ENV-ALGO-SEED."""
    policy: PolicyName = "auto"
    """Control only: two perceptrons, a CNN for images or an LSTM; auto takes a CNN for images, else perceptrons.
    To an LSTM, --config.minibatch-size is a number of slots; see presets.CARTPOLE_LSTM. DQN's is q."""
    policy_kwargs: str = "{}"
    """Further arguments of the policy as a JSON object, such as '{"normalize_observations": true}'."""
    model: str = "embedded"
    """Text only: the embedded model, a folder written by save_pretrained, or a hub name."""
    trust_remote_code: bool = False
    """Text only: run Python code that the model brings with it. Only for a model that you trust like a program."""
    env_kwargs: str = "{}"
    """Further arguments of the environment as a JSON object, such as '{"dataset": "chain_sum"}'."""
    process_timeout: float | None = None
    """Control only, for slow or unstable environments: run each in a process of its own, which is replaced if it
    crashes or takes more than these seconds for a step (60 suits most)."""
    kl_coef: float | None = None
    """Text only: reward charged per nat of KL to the model as loaded; 0 measures it only, None does not."""
    num_episodes: int = 20
    """Episodes of the evaluation after training (prompts of the test split in text)."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; default a tenth of the training. Ctrl-C and SIGTERM write one before they end it."""
    resume: Path | None = None
    """Run folder, or one of its checkpoints, to go on from; its other arguments are remembered. With ENV and the others
    given too it starts the run if there is no checkpoint yet: one command for a supervisor to repeat."""
    overwrite: bool = False
    """Remove the run that is in the folder; without it, a folder that holds one is refused."""
    json: bool = False
    """Print one JSON object last, instead of a table."""
    config: ConfigT
    """Hyper-parameters; the defaults shown are those of the environment's preset."""

    def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Train, save, evaluate; the arguments are what ``--resume`` needs to do so again."""
        from algos.config import GROUPED
        from algos.make import is_ours, make_agent, make_policy, make_vector_environment

        start = time.perf_counter()
        if self.num_envs < 1 or self.num_episodes < 1:  # not after the training, in the evaluation
            raise ValueError(
                f"--num-envs is {self.num_envs} and --num-episodes {self.num_episodes}, expected at least 1 of each"
            )
        every = max(1, self.total_steps // 10) if self.checkpoint_every is None else self.checkpoint_every
        if self.total_steps < 1 or every < 1:
            raise ValueError(
                f"--total-steps is {self.total_steps} and --checkpoint-every {every}, expected at least 1 of each"
            )
        config = self.config if self.seed is None else replace(self.config, seed=self.seed)
        run_dir = self.folder
        here = self.resume is not None and run_of(self.resume) == run_dir.resolve()
        if not here:
            check_new(run_dir, overwrite=self.overwrite)
        elif self.overwrite:
            raise ValueError("--resume goes on with the run that --overwrite would remove: give one of them")
        options, more = self._environment_arguments(), _json_object(self.policy_kwargs, "--policy-kwargs")
        env = make_vector_environment(self.env, self.num_envs, seed_each=self.algo in GROUPED, **options)
        _one_thread()
        from algos.evaluation import summarise

        policy = make_policy(env, policy=self.policy, model=self.model, seed=config.seed, **more)
        agent = make_agent(self.algo, env, policy, config, kl_coef=self.kl_coef)
        known = json.dumps(to_remember(arguments, _switches())) + "\n"

        def remember(metrics: dict[str, float]) -> None:
            """Not before: what cannot start, or go on, changes nothing."""
            if not (run_dir / ARGUMENTS).is_file() or (run_dir / ARGUMENTS).read_text(encoding="utf-8") != known:
                (run_dir / ARGUMENTS).write_text(known, encoding="utf-8")

        history = agent.learn(
            self.total_steps,
            run_dir=run_dir,
            progress=not self.json,
            on_iteration=remember,
            checkpoint_every=every,
            resume=self.resume,
            overwrite=self.overwrite,
        )
        split = {"split": "test"} if is_ours(self.env) else {}
        env.close()
        slots = min(self.num_episodes, 64 if self.process_timeout is None else self.num_envs)
        with closing(make_vector_environment(self.env, slots, **(options | split))) as test_env:
            result = summarise(test_env, policy, num_episodes=self.num_episodes, seed=config.seed)
        seconds = time.perf_counter() - start
        return result | {"steps": history[-1]["steps"], "seconds": seconds, "run_dir": str(run_dir)}

    @property
    def folder(self) -> Path:
        """The run's folder."""
        seed = self.config.seed if self.seed is None else self.seed
        return self.run_dir or Path("runs") / f"{self.env.replace('/', '-')}-{self.algo}-{seed}"

    def _environment_arguments(self) -> dict[str, Any]:
        from algos.make import is_ours, is_text

        arguments = _json_object(self.env_kwargs, "--env-kwargs")
        if is_ours(self.env):
            more = {"model": self.model, "kl_coef": self.kl_coef}
            return more | {"process_timeout": self.process_timeout} | arguments
        if not is_text(self.env) and (self.model != "embedded" or self.kl_coef is not None):
            raise ValueError(f"--model and --kl-coef are for text environments, {self.env} is none")
        return {"process_timeout": self.process_timeout} | arguments


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play episodes with a saved agent."""

    folder: tyro.conf.Positional[Path]
    """Run folder of a trained agent."""
    env: str | None = None
    """Another environment than the agent was trained on; or module:id, where a module registers it."""
    num_episodes: int = 20
    """Episodes to play (prompts of the test split in text)."""
    deterministic: bool = False
    """Take the most probable action instead of a sample."""
    seed: int = 0
    """Of start states or prompts, and of sampled actions."""
    trust_remote_code: bool = False
    """Run Python code that the model brings with it. Only for a model that you trust like a program."""
    json: bool = False
    """Print one JSON object last, instead of a table."""

    def run(self) -> dict[str, Any]:
        """Load and play."""
        from algos.make import remake_environment
        from algos.training.save import load, read_description

        description, slots = read_description(self.folder), max(1, min(self.num_episodes, 64))
        env = remake_environment(description, num_envs=slots, env_id=self.env)
        _one_thread()
        from algos.evaluation import summarise

        options = {"num_episodes": self.num_episodes, "deterministic": self.deterministic, "seed": self.seed}
        return summarise(env, load(self.folder), **options)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train any environments by any algorithms and put them side by side, on a page and in CSV files."""

    cases: tyro.conf.Positional[tuple[str, ...]] = DEFAULT_CASES
    """ENV or ENV:ALGO,ALGO, such as CartPole-v1:ppo,a2c textenv/Reviews-v0:ppo,grpo."""
    seeds: int = 3
    """Runs of each."""
    total_steps: int | None = None
    """Steps of every run; None is the budget of each one's preset."""
    run_dir: Path = Path("runs/compare")
    """Folder for the runs, report.html, report.png, curves.csv and summary.csv."""
    overwrite: bool = False
    """Remove runs of these cases and seeds that are in the folder; without it they are refused."""
    json: bool = False
    """Print one JSON object last, instead of a table."""

    def run(self) -> dict[str, Any]:
        """Train, draw, write."""
        from algos.comparison.compare import compare, parse_cases

        return compare(
            self.run_dir,
            cases=parse_cases(self.cases),
            seeds=self.seeds,
            total_steps=self.total_steps,
            overwrite=self.overwrite,
            quiet=self.json,
        )


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Write a language model that was trained with an adapter (LoRA) as a plain model folder."""

    folder: tyro.conf.Positional[Path]
    """Run folder of a trained agent."""
    to: tyro.conf.Positional[Path]
    """Folder to write; it must not be there yet."""
    json: bool = False
    """Print one JSON object last, instead of a table."""

    def run(self) -> dict[str, Any]:
        """Load, merge, write."""
        from algos.training.save import load, read_description

        if self.to.exists():
            raise FileExistsError(f"{self.to} is there already: give a folder that is not")
        name = read_description(self.folder)["policy"]
        if name != "LMPolicy":
            raise ValueError(f"{self.folder} holds a {name}, and only language models have adapters")
        policy: Any = load(self.folder)
        return {"merged": str(policy.merge(self.to))}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Look for the bugs that text environments keep having; exit status 1 if one is found."""

    env: tyro.conf.Positional[str]
    """Gymnasium id of a text environment; module:id imports the module that registers it first."""
    env_kwargs: str = "{}"
    """Arguments of the environment as a JSON object."""
    json: bool = False
    """Print one JSON object last, instead of a table."""

    def run(self) -> dict[str, Any]:
        """Check every form that the environment has."""
        import gymnasium

        from textenv.rewards.calling import read_module

        found: dict[str, str] = {}
        sound = True
        module, _, env_id = self.env.rpartition(":")
        arguments = _json_object(self.env_kwargs, "--env-kwargs")
        if module:
            read_module(module)
        try:
            gymnasium.spec(env_id)
            _one_thread()
            from textenv.checks.env_checker import checked_variants, run_checks

            forms = checked_variants(env_id, **arguments)
            for form, make in forms:
                results = run_checks(make())
                found |= {f"{form}: {result.name}": result.verdict for result in results}
                sound = sound and not any(result.problem for result in results)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"cannot make {self.env!r}: {error}") from error
        return found | {"sound": sound}


@dataclass(frozen=True, kw_only=True)
class CheckReward:
    """Look for the bugs that reward functions keep having, and what cheating earns; exit status 1 if one is found."""

    function: tyro.conf.Positional[str]
    """my_rewards.py:name or package.module:name."""
    prompts: Path | None = None
    """File of prompts, the columns that the function needs and, if it has one, a column completion; reviews without."""
    rows: int = 32
    """Prompts of the file that are used."""
    json: bool = False
    """Print one JSON object last, instead of a table."""

    def run(self) -> dict[str, Any]:
        """Load the function, check it, and print the report."""
        from textenv.checks.reward_checker import print_report, run_reward_checks
        from textenv.prompts.files import load_prompts
        from textenv.rewards import load_function

        function = load_function(self.function)
        data: dict[str, Any] = {}
        if self.prompts is not None:
            if self.rows < 1:
                raise ValueError(f"--rows is {self.rows}, expected at least 1")
            records = load_prompts(self.prompts)[: self.rows]
            names = [name for name in records[0] if name not in ("prompt", "completion")]
            data = {
                "prompts": [record["prompt"] for record in records],
                "completions": [record["completion"] for record in records] if "completion" in records[0] else None,
                "columns": {name: [record.get(name) for record in records] for name in names},
            }
        report = run_reward_checks(function, **data)
        if not self.json:
            print_report(report)
        results = {result.name: result.verdict for result in report.results}
        probes = {probe.name: probe.mean for probe in report.probes}
        return {"results": results, "probes": probes, "sound": not report.broken}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console scripts; exit status 2 on wrong input."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        arguments = with_remembered(given, _switches())
        _refuse_foreign_flags(arguments)
        commands = (
            _train_command(arguments)
            | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
            | Annotated[Compare, tyro.conf.subcommand("compare")]
            | Annotated[Merge, tyro.conf.subcommand("merge")]
            | Annotated[Check, tyro.conf.subcommand("check")]
            | Annotated[CheckReward, tyro.conf.subcommand("check-reward")]
        )
        description = "Train and compare policies for control and text by one kit of algorithms."
        command: Any = tyro.cli(commands, args=arguments, prog="algos", description=description)
        with _code_of_models(command, given):
            result = command.run(arguments) if isinstance(command, Train) else command.run()
    except Interrupted as stop:
        print(f"algos: {stop}; go on by: algos train --resume {command.folder}", file=sys.stderr)
        raise SystemExit(stop.status) from stop
    except (ValueError, TypeError, OSError, ImportError, InvariantError) as error:
        told = [str(error), *getattr(error, "__notes__", [])]  # where what the run has produced was saved
        print("\n".join(f"algos: {printable(line)}" for line in told), file=sys.stderr)
        raise SystemExit(1 if isinstance(error, InvariantError) else 2) from error
    if command.json:
        print(json.dumps(result))
    elif not isinstance(command, (Compare, CheckReward)):
        _print_table(result)
    if isinstance(command, (Check, CheckReward)) and not result["sound"]:
        raise SystemExit(1)


def _refuse_foreign_flags(arguments: Sequence[str]) -> None:
    """Raise a ValueError that suggests our flag for one of another library, or of a config without its prefix."""
    commands = {"train": Train, "evaluate": Evaluate, "compare": Compare}
    if not arguments or arguments[0] not in commands:
        return
    own = [field.name for field in fields(commands[arguments[0]])]
    config = CONFIGS.get(named(arguments, "--algo", "ppo")) if arguments[0] == "train" else None
    hyper = [] if config is None else [field.name for field in fields(config)]
    for word in arguments[1:]:
        name = word.partition("=")[0].removeprefix("--").removeprefix("config.").replace("-", "_")
        known = own if not word.startswith("--config.") else hyper
        if not word.startswith("--") or {name, name.removeprefix("no_")} & {*known, "help"}:
            continue
        ours = nearest(name, [*own, *hyper]) or ""
        prefix = "" if ours in own else "config."
        if ours in (*own, *hyper):
            raise ValueError(f"there is no {word.partition('=')[0]}: did you mean --{prefix}{ours.replace('_', '-')}?")


def _code_of_models(command: Any, given: Sequence[str]) -> AbstractContextManager[None]:
    """Within it models may run code of their own, if that was asked for: by whoever runs this, not in a run's file."""
    if not getattr(command, "trust_remote_code", False):
        return nullcontext()
    if not any(word.replace("_", "-") == "--trust-remote-code" for word in given):
        raise ValueError(
            f"the run was started with --trust-remote-code, which {ARGUMENTS} cannot grant: give it again if you "
            "trust the model's code"
        )
    return trust_remote_code()


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option} is {text!r:.200}, which is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{option} is {text!r:.200}, expected a JSON object such as '{{\"k\": 4}}'")
    return found


def _train_command(arguments: Sequence[str]) -> Any:
    """The defaults of ``train`` are those of the environment and algorithm, or recurrent policy, that are named."""
    arguments = arguments if arguments[:1] == ["train"] else ["train"]
    algorithm, policy = named(arguments, "--algo", "ppo"), named(arguments, "--policy", "auto")
    at = place_of_environment(arguments, _switches())
    env_id = "" if at is None else arguments[at]
    if ":" in env_id:
        with suppress(ValueError):  # which is said when it is made
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


def _switches() -> set[str]:
    """Options of ``train`` that take no value."""
    kinds: list[Any] = [Train, *CONFIGS.values()]
    return {field.name for kind in kinds for field in fields(kind) if field.type == "bool"}


def _one_thread() -> None:
    """Small models are fastest on one thread; a user's OMP_NUM_THREADS is left in force."""
    import os

    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for name, value in result.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(Text(printable(name)), Text(printable(shown)))
    Console().print(table)
