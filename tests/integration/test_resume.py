"""A training that stops and goes on in a new process is the one that never stopped, to the last bit."""

import json
import os
import resource
import shutil
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml

import algos
import textenv  # noqa: F401 (registers the environments)
from algos import (
    PPO,
    MLPPolicy,
    PPOConfig,
)
from algos.cli import main
from algos.storage import run_folder
from algos.storage.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from tests.helpers import forks
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.resumable_agents import (
    AGENTS,
    ITERATIONS,
    STOPPED,
    TOTAL,
    a2c,
    go_on,
    mlp,
    ppo_cartpole,
    ppo_sync,
    ppo_wrapped,
    train,
)

TIMES = ("time/",)


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: x for key, x in line.items() if not key.startswith(TIMES)} for line in lines]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder for each agent, whose training was stopped halfway and gone on with in another process."""
    home = tmp_path_factory.mktemp("interrupted")
    for name in AGENTS:
        train(name, home / name, iterations=STOPPED, total=TOTAL)
    forks.run(go_on, home)
    return home


@pytest.mark.heavy
@pytest.mark.bits
@pytest.mark.parametrize("name", sorted(AGENTS))
def test_a_run_that_goes_on_in_a_new_process_equals_one_that_never_stopped(name, interrupted, tmp_path):
    """Weights, and every logged value but the time; optimiser, schedules and random numbers are what they come from."""
    train(name, tmp_path, iterations=ITERATIONS, total=TOTAL)
    found, expected = logged(interrupted / name), logged(tmp_path)
    assert len(expected) == ITERATIONS and found == expected
    one, other = (torch.load(folder / "weights.pt") for folder in (interrupted / name, tmp_path))
    assert all(torch.equal(one[key], other[key]) for key in one)


# --- what is damaged, missing or full --------------------------------------------------------------------------------


def short_run(folder, **options):
    agent = ppo_sync()
    return agent.learn(64 * 6, run_dir=folder, checkpoint_every=64, **options)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "state.safetensors").unlink(), "state.safetensors is missing"),
        (lambda folder: flip(folder / "state.safetensors"), "the checksum of state.safetensors differs"),
        (lambda folder: flip(folder / "state.json"), "the checksum of state.json differs"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda folder: newer(folder / "manifest.json"), "has format 99"),
    ],
    ids=["missing", "tensors", "json", "manifest", "version"],
)
def test_a_damaged_checkpoint_offers_the_one_before_it(damage, said, tmp_path):
    short_run(tmp_path)
    older, newest = checkpoints(tmp_path)
    damage(newest)
    with pytest.raises(ValueError, match=said) as caught:
        ppo_sync().learn(64 * 8, run_dir=tmp_path, resume=tmp_path)
    assert f"--resume {older}" in str(caught.value)
    with pytest.raises(FileExistsError, match="agent that was trained for 384 steps, which going on .* overwrite=True"):
        ppo_sync().learn(64 * 8, run_dir=tmp_path, resume=older)
    history = ppo_sync().learn(64 * 8, run_dir=tmp_path, resume=older, overwrite=True)
    assert [metrics["iteration"] for metrics in history] == list(range(1, 9))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def newer(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


def fill_the_disk(run):
    """Print what each attempt to write more than 64 KiB says."""
    write_checkpoint(run, {"a": torch.ones(3)}, steps=10)
    ppo_sync().save(run)
    env = ppo_sync().env
    wide = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(256, 256))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
    options = dict(run_dir=run / "other", checkpoint_every=1)
    for attempt in (
        lambda: write_checkpoint(run, {"a": torch.ones(2**16)}, steps=20),
        lambda: PPO(env, wide).save(run),
        lambda: PPO(env, wide, PPOConfig(num_steps=16, minibatch_size=32)).learn(64, **options),
    ):
        try:
            attempt()
        except OSError as error:
            print(json.dumps([str(error), *getattr(error, "__notes__", [])]))


@pytest.mark.heavy
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    """A limit on the size of files, which the system enforces, as safetensors finds it: by an error of its own."""
    done = forks.run(fill_the_disk, tmp_path)
    checkpoint, agent, first = map(json.loads, done.stdout.splitlines()[-3:])
    (good,) = checkpoints(tmp_path)
    assert "File too large" in checkpoint[0] and f"the last good one is {good}" in checkpoint[1]
    assert read_checkpoint(tmp_path)["a"].tolist() == [1, 1, 1]
    assert "File too large" in agent[0] and str(tmp_path) in agent[0]
    assert algos.load(tmp_path).hidden == (8, 8), "the agent that was there is still whole"
    assert "there is no earlier one" in first[1] and "not everything could be saved" in first[2]
    assert len(logged(tmp_path / "other")) == 1
    assert not list(tmp_path.rglob(".draft*"))


@pytest.mark.parametrize("folder", ["/proc/run", "/proc/self/run"])
def test_a_read_only_folder_is_refused_before_training(folder):
    """Also for root, who may write nearly anywhere."""
    with pytest.raises(OSError, match="/proc"):
        short_run(folder)


def test_a_folder_locked_in_mid_run_is_said(tmp_path):
    def spoil(metrics):
        if metrics["iteration"] == 3:
            (tmp_path / "checkpoints").rename(tmp_path / "kept")
            (tmp_path / "checkpoints").write_text("in the way")

    with pytest.raises(OSError, match="checkpoints") as caught:
        short_run(tmp_path, on_iteration=spoil)
    assert "could not be written" in caught.value.__notes__[0]
    assert "the agent in its present state is saved" in caught.value.__notes__[1]
    assert algos.load(tmp_path).hidden == (8, 8)


def test_an_impossible_run_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        short_run(tmp_path / "file" / "run")


def test_two_checkpoints_are_kept(tmp_path):
    short_run(tmp_path)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-000000000320", "step-000000000384"]
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        read_checkpoint(tmp_path / "policy")
    with pytest.raises(FileNotFoundError, match="this run has: step-000000000320, step-000000000384"):
        read_checkpoint(tmp_path / "checkpoints" / "step-000000000001")


def contents(folder):
    """Every file, but for the lock's own."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.mark.heavy
def test_a_second_start_in_a_runs_folder_is_refused(tmp_path):
    """It changes nothing and says what to do."""
    short_run(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds a run already: .*--resume .*another folder.*--overwrite"):
        short_run(tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / "mine.txt").write_text("notes")
    history = ppo_sync().learn(64 * 2, run_dir=tmp_path, overwrite=True)
    assert len(history) == len(logged(tmp_path)) == 2
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-000000000064", "step-000000000128"]
    assert (tmp_path / "mine.txt").read_text() == "notes"
    with pytest.raises(ValueError, match="give only one of them"):
        ppo_sync().learn(64 * 2, run_dir=tmp_path, overwrite=True, resume=tmp_path)


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl", "policy/policy.safetensors", "checkpoints/step-1/x"])
def test_a_folder_with_any_file_of_a_run_counts_as_one(left, tmp_path):
    path = tmp_path / left
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    with pytest.raises(FileExistsError, match="holds a run already"):
        ppo_sync().learn(64, run_dir=tmp_path)


def test_fine_tuning_does_not_empty_a_run_either(tmp_path):
    lm = algos.LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    algos.sft(lm, ["a b c d"], algos.SFTConfig(max_length=16), run_dir=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="holds a run already"):
        algos.sft(lm, ["a b c d"], algos.SFTConfig(max_length=16), run_dir=tmp_path)
    assert contents(tmp_path) == before
    algos.sft(lm, ["a b c d"], algos.SFTConfig(max_length=16), run_dir=tmp_path, overwrite=True)


def test_two_runs_cannot_share_a_folder(tmp_path):
    """From within the first one's iteration, and while another process holds the folder."""
    refused = []

    def second(metrics):
        with pytest.raises(BlockingIOError, match=rf"in use by process {os.getpid()} on .* since 2.*: wait") as caught:
            ppo_sync().learn(64, run_dir=tmp_path, resume=tmp_path if metrics["iteration"] > 1 else None)
        refused.append(caught.value)

    assert len(ppo_sync().learn(64 * 3, run_dir=tmp_path, on_iteration=second)) == 3
    assert len(refused) == 3 and len(logged(tmp_path)) == 3
    assert len(ppo_sync().learn(64, run_dir=tmp_path, overwrite=True)) == 1, "the folder is free again"


def test_drafts_of_a_killed_process_are_removed(tmp_path):
    """A draft's name has its process."""
    for draft in (tmp_path / ".draft-99-policy", tmp_path / "checkpoints" / ".draft-99-step-1"):
        draft.mkdir(parents=True)
    with run_folder.replacing(tmp_path / "policy") as new:
        assert new.name == f".draft-{os.getpid()}-policy"
        new.touch()
    (tmp_path / "policy").unlink()
    short_run(tmp_path)
    assert not list(tmp_path.rglob(".draft*"))


@pytest.mark.heavy
def test_one_command_starts_a_run_and_goes_on_with_it(tmp_path):
    """`resume` of the run's own folder, which has no checkpoint before the first start, nor after an early death."""
    both = dict(run_dir=tmp_path / "run", resume=tmp_path / "run", checkpoint_every=64 * 4)

    def dies(metrics):
        if metrics["iteration"] == 3:
            raise RuntimeError("died")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="died"):
            ppo_sync().learn(64 * 6, **both, on_iteration=dies)
    assert len(ppo_sync().learn(64 * 6, **both)) == 6
    assert len(ppo_sync().learn(64 * 8, **both)) == 8
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        ppo_sync().learn(64, run_dir=tmp_path / "other", resume=tmp_path / "nothing")


@pytest.mark.heavy
@pytest.mark.parametrize("damage", [
    lambda path: path.unlink(),
    lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2])),
    lambda path: path.write_bytes(b""),
], ids=["missing", "shorter", "empty"])  # fmt: skip
def test_lost_metrics_come_back_from_the_checkpoint(damage, tmp_path, caplog):
    short_run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    damage(tmp_path / "metrics.jsonl")
    history = ppo_sync().learn(64 * 8, run_dir=tmp_path, resume=tmp_path)
    after = (tmp_path / "metrics.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == len(history) == 8
    assert "of 6 iterations: the rest are taken from the checkpoint" in caplog.text


@pytest.mark.parametrize(("answer", "stops"), [(True, True), (np.True_, True), (None, False), (False, False)])
def test_every_iteration_is_reported_and_true_stops(answer, stops):
    seen = []

    def report(metrics):
        seen.append(metrics["iteration"])
        return answer if metrics["iteration"] == 2 else None

    history = ppo_sync().learn(64 * 4, on_iteration=report)
    assert seen == [metrics["iteration"] for metrics in history] == list(range(1, 3 if stops else 5))


def test_another_number_of_environments_is_refused(tmp_path):
    short_run(tmp_path)
    env = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")
    with pytest.raises(ValueError, match="the run has 4 environment slots, but this agent has 8: make the same number"):
        PPO(env, mlp(env), PPOConfig(num_steps=16, minibatch_size=32)).learn(1, resume=tmp_path)


def test_another_seed_is_refused_in_words(tmp_path):
    short_run(tmp_path)
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    with pytest.raises(ValueError, match="the run has seed 1 and this agent 2: leave the seed out"):
        PPO(env, mlp(env), PPOConfig(num_steps=16, minibatch_size=32, seed=2)).learn(1, resume=tmp_path)


def test_an_unsavable_wrapper_is_reset_and_named(tmp_path, caplog):
    def make():
        agent = ppo_wrapped()
        agent.env.secret = object()
        return agent

    make().learn(64, run_dir=tmp_path, checkpoint_every=64)
    assert "NormalizeReward cannot be saved mid-episode: its secret is a object" in caplog.text


def test_an_unsavable_environment_is_reset_and_named(tmp_path, caplog):
    class Foreign(gym.Wrapper):
        pass

    def make():
        env = gym.vector.SyncVectorEnv([lambda: Foreign(gym.make("CartPole-v1"))] * 4)
        return PPO(env, mlp(env), PPOConfig(num_steps=16, minibatch_size=32))

    make().learn(64 * 2, run_dir=tmp_path, checkpoint_every=64)
    assert caplog.text.count("Foreign cannot be saved mid-episode") == 1
    history = make().learn(64 * 4, run_dir=tmp_path, resume=tmp_path)
    assert [metrics["iteration"] for metrics in history] == list(range(1, len(history) + 1)) and len(history) > 3


def test_another_agent_or_environment_is_refused(tmp_path):
    short_run(tmp_path)
    with pytest.raises(ValueError, match="a run of PPO, but this agent is A2C"):
        a2c().learn(1, resume=tmp_path)
    with pytest.raises(ValueError, match="make it in the same way as for the run"):
        ppo_cartpole().learn(1, resume=tmp_path)
    env = ppo_sync().env
    wide = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 9))
    with pytest.raises(ValueError, match="the policy is not the one that was saved"):
        PPO(env, wide, PPOConfig(num_steps=16, minibatch_size=32)).learn(1, resume=tmp_path)


@pytest.mark.parametrize("options", [dict(checkpoint_every=0), dict(checkpoint_every=10, run_dir=None)])
def test_checkpoints_need_an_interval_and_a_folder(options, tmp_path):
    with pytest.raises(ValueError, match="checkpoint_every"):
        ppo_sync().learn(64, **({"run_dir": tmp_path} | options))


# --- signals and kills -----------------------------------------------------------------------------------------------


TRAIN = ["train", "CartPole-v1", "--config.num-steps", "16", "--num-envs", "4", "--checkpoint-every", "128",
         "--num-episodes", "1", "--json"]  # fmt: skip


def killed_and_resumed(tmp_path, kills):
    """Kill a training at random moments, its writing of checkpoints included; returns steps after each start."""
    rng, found = np.random.default_rng(0), []
    run = tmp_path / "run"
    command = [*TRAIN, "--total-steps", "100000000", "--run-dir", str(run)]
    for _ in range(kills):
        with forks.started(main, command) as (process, _):
            limit, before = time.time() + 120, found[-1] if found else 0
            while newest(run) <= before and time.time() < limit and process.is_alive():
                time.sleep(0.02)
            assert process.is_alive() and newest(run) > before
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
        reached = last_step(run)
        saved = read_checkpoint(run)["steps"]
        assert reached - saved < 128 + 2 * 64  # the interval, and the iteration under way
        found.append(saved)
        command = ["train", "--resume", str(run), "--json"]
    return found


def newest(run):
    """Steps of the newest checkpoint, 0 without one."""
    return max((int(folder.name.removeprefix("step-")) for folder in checkpoints(run)), default=0)


def last_step(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["steps"] if whole else 0


@pytest.mark.long
def test_three_kills_lose_at_most_the_interval(tmp_path):
    found = killed_and_resumed(tmp_path, 3)
    assert found == sorted(found) and len(set(found)) == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_lose_at_most_the_interval(tmp_path):
    found = killed_and_resumed(tmp_path, 50)
    print(f"50 kills: {found[-1]} steps saved, each start went on from its checkpoint")
    assert found == sorted(found)


@pytest.mark.heavy
def test_a_run_goes_on_by_its_folder_alone(tmp_path, capsys):
    run = str(tmp_path / "run")
    main([*TRAIN, "--total-steps", "256", "--run-dir", run, "--seed", "3"])
    main(["train", "--resume", run, "--total-steps", "512"])
    out = capsys.readouterr().out.strip().splitlines()
    steps = [json.loads(line)["steps"] for line in out]
    assert 256 <= steps[0] < 512 <= steps[1] and last_step(tmp_path / "run") == steps[1]
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume", str(tmp_path)])
    assert stop.value.code == 2 and "holds no run to resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["train", "Acrobot-v1", "--resume", run])
    assert stop.value.code == 2 and "a run on CartPole-v1, not on Acrobot-v1" in capsys.readouterr().err


@pytest.mark.heavy
def test_one_command_line_starts_and_continues_a_run(tmp_path, capsys):
    """A supervisor repeats it; the start command without --resume is refused and changes nothing."""
    run = str(tmp_path / "run")
    command = [*TRAIN, "--seed", "3", "--resume", run, "--total-steps"]
    main([*command, "256"])
    stored = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert "resume" not in stored and stored["env"] == "CartPole-v1" and stored["config"]["adam_eps"] == 1e-5
    main([*command, "512"])
    steps = [json.loads(line)["steps"] for line in capsys.readouterr().out.strip().splitlines()]
    assert 256 <= steps[0] < 512 <= steps[1]
    before = contents(tmp_path)
    for arguments, said in (
        ([*TRAIN, "--run-dir", run], "holds a run already"),
        (["train", "--resume", run, "--overwrite"], "give only one of them"),
        (["train", "--resume", run, "--num-envs", "8"], "4 environment slots, but this agent has 8"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2 and said in capsys.readouterr().err
        assert contents(tmp_path) == before
    main([*TRAIN, "--run-dir", run, "--overwrite", "--total-steps", "64"])
    assert json.loads(capsys.readouterr().out)["steps"] < 256
    assert "overwrite" not in yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    main(["train", "--resume", run, "--total-steps", "256"])
    assert last_step(tmp_path / "run") >= 256


@pytest.mark.parametrize("ending", ["finished", "stopped", "failed"])
@pytest.mark.parametrize("version", ["0.9.0", "0.10.0"])
def test_no_agent_without_a_checkpoint_is_replaced(version, ending, tmp_path):
    """Ctrl-C left such a run before 0.10, whose resume started again from the first step without a word."""
    ppo_sync().learn(64 * 4, run_dir=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    if ending != "finished":
        (tmp_path / ".failed").write_text(ending)
    if version == "0.9.0":
        config = json.loads((tmp_path / "config.json").read_text())
        del config["steps"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    before = contents(tmp_path)
    advice = r"holds an agent trained for 256 steps \(config.json, policy\) but no checkpoint.*algos.load.*--overwrite"
    with pytest.raises(FileExistsError, match=advice):
        ppo_sync().learn(64 * 2, run_dir=tmp_path, resume=tmp_path)
    with pytest.raises(FileNotFoundError, match="step-000000099999"):
        ppo_sync().learn(64 * 2, run_dir=tmp_path, resume=tmp_path / "checkpoints" / "step-000000099999")
    assert contents(tmp_path) == before


@pytest.mark.heavy
def test_a_run_remembers_its_last_accepted_arguments(tmp_path, capsys):
    """A refused start left its arguments for the next run; a longer training was forgotten by the next --resume."""
    run = str(tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["train", "Acrobot-v1", "--total-steps", "0", "--run-dir", run])
    assert not (tmp_path / "run").exists()
    words = ["--seed", "3", "CartPole-v1", *TRAIN[2:]]  # the environment need not come first
    main(["train", *words, "--resume", run, "--total-steps", "256"])
    main(["train", "--resume", run, "--total-steps=512"])
    known = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert (known["env"], known["total_steps"], known["seed"]) == ("CartPole-v1", 512, 3) and "run_dir" not in known
    before = contents(tmp_path)
    capsys.readouterr()
    main(["train", "--resume", run])
    assert json.loads(capsys.readouterr().out)["steps"] >= 512 and last_step(tmp_path / "run") >= 512
    before = contents(tmp_path / "run")
    other = tmp_path / "other"
    main(["train", "--resume", run, "--run-dir", str(other), "--total-steps", "640"])
    assert last_step(other) >= 640 and contents(tmp_path / "run") == before
    assert "other" not in (other / "run.yaml").read_text()
    (other / "run.yaml").rename(other / "arguments.json")
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume", str(other)])
    assert stop.value.code == 2 and "arguments.json is of an older version" in capsys.readouterr().err
