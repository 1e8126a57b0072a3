"""``algos evaluate``, ``algos merge`` and ``algos push``: commands for a saved agent."""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import tyro

from algos.cli.arguments import Command, ModelCommand, json_object, load_newest, one_thread
from algos.cli.pass_rates import PassRateOptions
from algos.cli.tables import print_table
from algos.storage.run_folder import check_new_file
from textenv.importing import absolute_name
from textenv.optional import package

if TYPE_CHECKING:
    from algos.storage.run_reader import AgentRecord

MAX_ENVS = 64
"""Largest number of slots to play in."""

FILMED_EPISODES = 3
"""Largest number of episodes in a film."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(PassRateOptions, ModelCommand):
    """Evaluate a saved agent on whole episodes."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[str]
    """Run folder of a trained agent, also of one under way (its newest checkpoint), or its name on the hub:
    user/name."""
    env: str | None = None
    """Environment other than the agent's own; module:id first imports the module that registers it."""
    reward: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Reward function of an agent of textenv/Prompts-v0, whose file is run only if it is named: rewards.py:function or
    rewards.py:function=0.5; repeat the flag for several."""
    prompts: str | None = None
    """Other prompts for an agent of textenv/Prompts-v0: a file, or a data set such as hf:owner/name:config/test."""
    wrapper: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Function that wraps each environment of the agent, which is run only if it is named, as in algos train."""
    policy_class: str | None = None
    """Class of the agent's policy, if it is one of your own, which is run only if it is named: file.py:Mine or
    package.module:Mine."""
    describe: str | None = None
    """Function that describes observations to the agent's language model, if it is one of your own, which is run only
    if it is named: file.py:function or package.module:function."""
    env_kwargs: str = "{}"
    """Arguments of the environment that replace those of the agent, as a JSON object; those of the agent that are no
    plain data are used only if they are named here."""
    num_episodes: int | None = None
    """Episodes to play (text: prompts of the test split); by default 20, not with --k."""
    deterministic: bool = False
    """Take the most probable action instead of a sample, as Stable-Baselines3 does by default."""
    seed: int = 0
    """Seed of start states or prompts, and of sampled actions."""
    device: str | None = None
    """Device of all models: auto (the GPU, if there is one), cpu, cuda, cuda:1 or mps; None is the CPU."""
    video: Path | None = None
    """File for a film of the first episodes, at most three: out.gif or out.mp4 (extra video)."""
    transcripts: Path | None = None
    """Text only: file for a line of JSON about each episode: prompt, completion, turns, score and its parts."""
    tokens: str | None = None
    """Text only: page (out.html) of the episodes with the numbers of each token; or one of log_ratio, kl,
    entropy, value, advantage and reward, to shade the tokens by it in the terminal."""

    def run(self) -> dict[str, object]:
        """Load the agent and play."""
        if self.num_episodes is not None and self.num_episodes < 1:
            raise ValueError(f"--num-episodes is {self.num_episodes}, expected at least 1")
        if self.num_episodes is not None and self.k is not None:
            raise ValueError(
                f"--num-episodes is {self.num_episodes}, but --k is given: say how many prompts by --num-prompts, each "
                "of which is sampled --num-samples times"
            )
        return self._with_absolute_paths()._evaluate()

    @property
    def _num_episodes(self) -> int:
        """Number of episodes where prompts are not sampled several times."""
        from algos.evaluation import DEFAULT_EPISODES

        return self.num_episodes or DEFAULT_EPISODES

    def _with_absolute_paths(self) -> Self:
        """Return the same command with absolute paths, as a reward or an environment may change the working folder."""
        tokens = self.tokens
        if tokens is not None and tokens.endswith(".html"):
            tokens = str(Path(tokens).absolute())
        return dataclasses.replace(
            self,
            folder=absolute_name(self.folder),
            answer=self.answer and absolute_name(self.answer),
            prompts=self.prompts and absolute_name(self.prompts),
            video=self.video and self.video.absolute(),
            transcripts=self.transcripts and self.transcripts.absolute(),
            tokens=tokens,
        )

    def _evaluate(self) -> dict[str, object]:
        """Play with a command whose paths are absolute, and write the files that it asks for."""
        self._check_files()
        sampling = self.sampling_arguments()
        from algos.storage.hub import agent_folder
        from algos.training.save import read_description

        # Environment and rewards; what these know from the training goes on
        description = read_description(self.folder)
        one_thread()  # imports torch, which errors until here do not wait for
        env = self._environment(description)
        from algos.storage.env_state import load_objects

        load_objects(agent_folder(self.folder), env)
        from algos.evaluation import evaluate, numbers_of
        from textenv.rewards.training import training
        from textenv.rollout import is_episode_env, num_episodes_of

        if not is_episode_env(env):
            self._refuse_text_options()

        # Policy
        policy, checkpoint = load_newest(
            self.folder, device=self.device, policy_class=self.policy_class, describe=self.describe
        )
        if self.device is not None and is_episode_env(env):
            env.to(policy.device)

        # Play; a reward with a curriculum is at its end
        options: dict[str, Any] = {"deterministic": self.deterministic, "seed": self.seed}
        with training(self._trained_steps(checkpoint), 1.0):
            if self.video is not None:
                from algos.cli.film import film_episodes

                film_episodes(env, policy, self.video, num_episodes=min(self._num_episodes, FILMED_EPISODES), **options)
            if self.tokens is not None:
                from algos.lab.insight.tokens import show_tokens

                show_tokens(
                    env,
                    policy,
                    self.tokens,
                    config=description["config"],
                    num_episodes=self._num_episodes,
                    **options,
                )
            start = time.perf_counter()
            evaluation = evaluate(env, policy, num_episodes=self.num_episodes, **options, **sampling)
            seconds = time.perf_counter() - start
            numbers = numbers_of(evaluation, env, policy, seconds=seconds)

        # Results, with the pass rates in a table or an object of their own
        pass_rates = evaluation.pass_rates
        result: dict[str, object] = {**numbers}
        if pass_rates is not None:
            result = {name: value for name, value in numbers.items() if name not in pass_rates.numbers()}
        if self.transcripts is not None:
            samples = env.samples(range(num_episodes_of(evaluation.rollout)))
            lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
            self.transcripts.write_text("".join(lines), encoding="utf-8")
        if checkpoint is not None:
            result["checkpoint"] = str(checkpoint)
        if not self.json:
            print_table(result.items())
        if pass_rates is not None:
            if not self.json:
                header, rows = pass_rates.table()
                print_table(rows, header)
            result["pass_rates"] = pass_rates.to_dict()
        return result

    def _check_files(self) -> None:
        """Raise an error if a file cannot be written, before anything is loaded."""
        page = None
        if self.tokens is not None and self.tokens.endswith(".html"):
            page = Path(self.tokens)
        for name, path in (("--video", self.video), ("--transcripts", self.transcripts), ("--tokens", page)):
            if path is not None:
                check_new_file(name, path)
        if self.video is not None:
            if self.video.suffix.lower() not in (".gif", ".mp4"):
                raise ValueError(f"--video is {self.video}, expected a file name that ends in .gif or .mp4")
            package("imageio_ffmpeg", "video")

    def _environment(self, description: "AgentRecord") -> Any:
        """Make the agent's environment again, with what the options replace."""
        from algos.make import remake_environment

        num_envs = min(self._num_episodes, MAX_ENVS)
        if self.k is not None:
            num_envs = MAX_ENVS
        return remake_environment(
            description,
            num_envs=num_envs,
            env_id=self.env,
            reward=self.reward,
            prompts=self.prompts,
            wrappers=self.wrapper,
            env_kwargs=json_object(self.env_kwargs, "--env-kwargs"),
        )

    def _refuse_text_options(self) -> None:
        """Raise a ValueError if options of text are set."""
        if self.transcripts is not None:
            name = "--transcripts"
        elif self.tokens:
            name = "--tokens"
        else:
            return
        raise ValueError(f"{name} is for text, but {self.folder} is no run on text: leave it out")

    def _trained_steps(self, checkpoint: Path | None) -> int:
        """Return the number of steps that the agent was trained for."""
        from algos.lab.run_summary import read_run

        if checkpoint is None:
            return read_run(Path(self.folder))["steps"]
        return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True, kw_only=True)
class Merge(Command):
    """Write a language model that was trained with an adapter (LoRA) as a plain model folder."""

    folder: tyro.conf.Positional[str]
    """Run folder of a trained agent, or its name on the hub: user/name."""
    to: tyro.conf.Positional[Path]
    """Folder to write; it must not exist yet."""

    def run(self) -> dict[str, object]:
        """Load, merge, write."""
        from algos.training.save import load, read_description

        if self.to.exists():
            raise FileExistsError(f"{self.to} exists already: give a folder that does not")
        name = read_description(self.folder)["policy"]
        if name != "LMPolicy":
            raise ValueError(f"{self.folder} holds a {name}, but only a language model has an adapter to merge")
        policy: Any = load(self.folder)
        return {"merged": str(policy.merge(self.to))}


@dataclass(frozen=True, kw_only=True)
class Push(Command):
    """Upload a saved agent to the Hugging Face Hub, with a model card made of its run."""

    folder: tyro.conf.Positional[Path]
    """Folder of a run, or RUN/best."""
    repo_id: tyro.conf.Positional[str]
    """Name on the hub: user/name."""
    private: bool = False
    """Make a repository that only you can see."""
    overwrite: bool = False
    """Replace what the repository holds, in a new commit; without this option, an existing one is an error."""

    def run(self) -> dict[str, object]:
        """Upload."""
        from algos.lab.model_card import push_to_hub

        url = push_to_hub(self.folder, self.repo_id, private=self.private or None, overwrite=self.overwrite)
        return {"pushed": url, "to_load": f'algos.load("{self.repo_id}")'}
