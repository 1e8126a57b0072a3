"""``algos train``: one's own prompts, rewards and models, configurations that repeat a run, and what it prints."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from algos import PPOConfig, load, presets
from algos.cli import main
from algos.config import CONFIGS
from tests.helpers.models import WORDS, make_llama, make_tokenizer

REWARDS = """
number = 3

def good(completions):
    return [float("good" in text) for text in completions]

def short(completions):
    return [-float(len(text.split())) for text in completions]

def right(completions, answer):
    return [float(a in text) for text, a in zip(completions, answer)]
"""
OWN = "train --model llama --prompts prompts.jsonl --reward rewards.py:good --max-prompt-tokens 4 --max-new-tokens 4"
SHORT = "--total-steps 40 --num-envs 4 --config.num-episodes 8 --config.minibatch-size 8 --num-episodes 2 --json"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny Llama in a folder, prompts, and rewards."""
    folder = tmp_path_factory.mktemp("own")
    make_llama().save_pretrained(folder / "llama")
    make_tokenizer(WORDS).save_pretrained(folder / "llama")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "broken.py").write_text("1 / 0\n")
    prompts = [{"prompt": f"{a} {b}", "answer": b} for a in WORDS[:4] for b in WORDS[:4]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "plain.jsonl").write_text('{"prompt": "a b"}\n')
    for name, text in CONFIGURATIONS.items():
        (folder / name).write_text(text)
    return folder


CONFIGURATIONS = {
    "bad.yaml": "a: [", "bad.toml": "a = = 3", "list.yaml": "- 1", "key.yaml": "lerning-rate: 3",
    "name.yaml": "config: {lr: 3}", "type.yaml": "num_envs: many", "range.yaml": "config: {gamma: 3}",
    "env.yaml": "env: --json", "group.yaml": "config: {group_size: 4}",
}  # fmt: skip


@pytest.fixture
def here(files, tmp_path, monkeypatch):
    """The folder with the files, from which commands are typed; runs go to another."""
    monkeypatch.chdir(files)
    return tmp_path


def rows(run):
    """Metrics without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: x for name, x in json.loads(line).items() if not name.startswith("time/")} for line in lines]


@pytest.mark.heavy
def test_run_yaml_repeats_a_run_to_the_bit_elsewhere(here, capsys, monkeypatch):
    words = "--reward rewards.py:short=0.5 --kl-coef .05 --seed 3 --eval-every 20 --eval-num-episodes 4"
    main([*shlex.split(f"{OWN} {SHORT} {words} --temperature 1.2"), "--run-dir", str(here / "first")])
    monkeypatch.chdir(here)
    main(["train", "--config", "first/run.yaml", "--run-dir", "second"])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert rows(here / "first") == rows(here / "second")
    assert first | {"seconds": 0, "run_dir": 0, "best": 0} == second | {"seconds": 0, "run_dir": 0, "best": 0}
    known = yaml.safe_load((here / "first" / "run.yaml").read_text())
    assert known == yaml.safe_load((here / "second" / "run.yaml").read_text())
    assert (known["seed"], known["config"]["learning_rate"], known["config"]["final_learning_rate"]) == (3, 5e-4, 1e-4)
    sample = json.loads((here / "first" / "samples.jsonl").read_text().splitlines()[0])
    parts = float("good" in sample["completion"]), -0.5 * len(sample["completion"].split())
    assert sample["parts"] == {"good": parts[0], "short": parts[1]} and sample["score"] == pytest.approx(sum(parts))
    main(["evaluate", "second", "--reward", f"{known['reward'][0]}", "--num-episodes", "4", "--json"])
    assert 0 <= json.loads(capsys.readouterr().out)["mean_return"] <= 1


@pytest.mark.heavy
def test_flags_replace_fields_and_rewards_of_a_file(here, capsys):
    own = {"model": "llama", "prompts": "prompts.jsonl", "reward": ["rewards.py:good", "rewards.py:short"]}
    own |= {"max-new-tokens": 3, "max_prompt_tokens": 4, "num_envs": 4, "total_steps": 8, "json": True}
    lines = [f"{name} = {json.dumps(value)}" for name, value in own.items()]
    lines += ["[config]", "num-episodes = 8", "learning_rate = 1e-3", "normalize_advantage = false"]
    (here / "own.toml").write_text("\n".join(lines))
    for algo in ("ppo", "reinforce"):
        words = f"--algo {algo} --max-new-tokens 2 --reward rewards.py:short --config.learning-rate 1e-4"
        main(["train", "--config", str(here / "own.toml"), *words.split(), "--run-dir", str(here / algo)])
        known = yaml.safe_load((here / algo / "run.yaml").read_text())
        assert (known["max_new_tokens"], known["max_prompt_tokens"], known["algo"]) == (2, 4, algo)
        assert [name.rpartition(":")[2] for name in known["reward"]] == ["short"]
        assert (known["config"]["learning_rate"], known["config"]["normalize_advantage"]) == (1e-4, False)


@pytest.mark.heavy
def test_stop_texts_hold_in_run_repetition_and_agent(here, capsys):
    main([*f"{OWN} {SHORT} --stop good --stop c --run-dir {here / 'run'}".split()])
    assert yaml.safe_load((here / "run" / "run.yaml").read_text())["stop"] == ["good", "c"]
    assert "the text 'good', the text 'c'" in json.loads((here / "run" / "config.json").read_text())["turns_end_with"]
    texts = [json.loads(line)["completion"] for line in (here / "run" / "samples.jsonl").read_text().splitlines()]
    assert texts and not any("good" in text or "c" in text for text in texts)
    main(["train", f"--config={here / 'run' / 'run.yaml'}", "--run-dir", str(here / "again"), "--json"])
    assert rows(here / "again") == rows(here / "run")
    assert load(here / "run").ends.texts == ("good", "c")
    capsys.readouterr()
    main(["evaluate", str(here / "run"), "--reward", "rewards.py:good", "--json"])
    assert json.loads(capsys.readouterr().out)["mean_return"] == 0, "no answer holds what ends it"


@pytest.mark.heavy
def test_an_adapter_with_a_critic_resumes_in_bfloat16(here, capsys):
    pytest.importorskip("peft")
    words = "--lora r=2,targets=q_proj+v_proj --critic copy --autocast --gradient-checkpointing --max-kl 50"
    main([*shlex.split(f"{OWN} {SHORT} {words}"), "--run-dir", str(here / "run")])
    adapter = json.loads((here / "run" / "policy" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], sorted(adapter["target_modules"])) == (2, 32, ["q_proj", "v_proj"])
    assert (here / "run" / "policy" / "critic").is_dir() and rows(here / "run")[0]["reference/kl"] == pytest.approx(
        0, abs=0.1
    )
    main(["train", "--resume", str(here / "run"), "--total-steps", "80"])
    assert rows(here / "run")[-1]["steps"] >= 80


@pytest.mark.heavy
def test_a_reached_score_ends_training(here, capsys):
    words = "--eval-every 20 --eval-num-episodes 4 --stop-at -100 --total-steps 100000"
    main([*shlex.split(f"{OWN} {SHORT} {words} --reward rewards.py:short"), "--run-dir", str(here / "run")])
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] < 200 and result["best"] == str(here / "run" / "best")
    main(["evaluate", result["best"], "--reward", "rewards.py:short", "--num-episodes", "2", "--json"])


@pytest.mark.parametrize("algo", CONFIGS)
def test_help_names_losses_and_no_function(algo, capsys):
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", "--algo", algo, "--help"])
    shown = capsys.readouterr().out
    assert "<function" not in shown and "(fixed to" not in shown
    assert ("--config.policy-loss {clipped_policy_loss,dual_clipped_policy_loss" in shown) == (
        algo in ("ppo", "grpo", "reinforce_plus_plus")
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("words", "said"), [
    ("train --model llama --prompts prompts.jsonl", "has no reward"),
    ("train --model llama --reward rewards.py:good", "has no prompts"),
    ("train --model llama --reward rewards.py:good --prompts missing.jsonl", "there is no file"),
    ("OWN --eval-prompts missing.jsonl", "there is no file"),
    ("OWN --prompt-column question", "not 'question'"),
    ("OWN --reward missing.py:f", "there is no file missing.py"),
    ("OWN --reward rewards.py:missing", "no function named 'missing'; its functions are good, short, right"),
    ("OWN --reward rewards.py:number", "a int, not a function"),
    ("OWN --reward rewards.py", "expected file.py:name"),
    ("OWN --reward broken.py:f", "could not be imported: ZeroDivisionError"),
    ("OWN --reward rewards.py:short=much", "whose weight is no number"),
    ("OWN --reward rewards.py:good", "given twice"),
    ("train --model llama --prompts plain.jsonl --reward rewards.py:right", "needs the column 'answer'"),
    ("OWN --chat", "has no chat template"),
    ("OWN --system-prompt hello", "has no chat template"),
    ("OWN --max-prompt-tokens 1", "has 2 tokens, the limit is 1"),
    ("OWN --max-new-tokens 100", "has 64 positions"),
    ("OWN --max-new-tokens 0", "max_new_tokens is 0"),
    ("OWN --temperature 0", "temperature is 0.0"),
    ("OWN --lora r=many", "lora is 'r=many', expected settings such as r=16,alpha=32"),
    ("OWN --lora dropout=.1", "no setting is named dropout"),
    ("OWN --lora targets=nothing", "{'nothing'} not found"),
    ("OWN --lora layers=0", "layers is 0, expected 1 to 2, the number of the model's layers"),
    ("OWN --lora layers=3", "layers is 3, expected 1 to 2"),
    ("OWN --lora layers=1,targets=nothing", "targets is ['nothing'], but the last layers have no linear modules"),
    ("OWN --critic missing", "critic is missing, which is no reward model of one score (cannot load"),
    ("OWN --critic llama/missing", "there is no folder llama/missing"),
    ("OWN --critic a/b/missing", "there is no folder a/b/missing"),
    ("OWN --critic owner/missing", "critic is owner/missing, which is no reward model of one score (cannot load"),
    ("OWN --critic llama", "no reward model of one score (label is 'positive'"),
    ("OWN --dtype int8", "invalid choice 'int8'"),
    ("OWN --device tpu", "device is 'tpu'"),
    ("OWN --logger paper", "logger is 'paper', expected one of tensorboard"),
    ("OWN --sample-every -1", "every is -1"),
    ("OWN --eval-every 0", "--eval-every is 0"),
    ("OWN --eval-every 8 --eval-num-episodes 0", "--eval-num-episodes is 0"),
    ("OWN --eval-every 8 --patience 0", "--patience is 0"),
    ("OWN --stop-at 1", "add --eval-every"),
    ("OWN --kl-coef None --max-kl 1", "--max-kl is 1.0 and --kl-coef None"),
    ("OWN --max-kl 0", "--max-kl is 0.0"),
    ("OWN --model missing", "cannot load"),
    ("OWN --model ./missing", "there is no folder ./missing: give the folder of a run or of a model"),
    ("OWN --model llama/missing", "there is no folder llama/missing"),
    ("OWN --model owner/missing", "there is no folder owner/missing, so the hub is asked for a model of this name"),
    ("OWN --model missing.gguf", "missing.gguf"),
    ("plan --model ./missing", "there is no folder ./missing"),
    ("tune textenv/Copy-v0 --model ./missing", "there is no folder ./missing"),
    ("OWN --algo dqn", "dqn is not for text"),
    ("OWN --config.policy-loss best", "invalid choice 'best'"),
    ("OWN --promts x", "did you mean --prompts?"),
    (
        "OWN --algo rloo --config.policy-loss x",
        "--algo rloo has no --config.policy-loss: it is for ppo, reinforce_plus_plus, grpo",
    ),
    (
        "OWN --algo ppo --config group.yaml",
        "--algo ppo has no --config.group-size: it is for rloo, grpo (it stands in a file of options)",
    ),
    ("OWN --algo rloo --config.lr 1", "did you mean --config.learning-rate?"),
    ("train CartPole-v1 --config.fit-value-head", "a MLPPolicy has no linear value head to fit"),
    ("OWN --config", "--config is --total-steps, expected a .toml, .yaml or .json file"),
    ("OWN --config missing.yaml", "no such file"),
    ("OWN --config rewards.py", "expected a .toml, .yaml or .json file"),
    ("OWN --config bad.yaml", "bad.yaml cannot be read as yaml"),
    ("OWN --config bad.toml", "bad.toml is no toml"),
    ("OWN --config list.yaml", "list.yaml holds [1]"),
    ("OWN --config key.yaml", "there is no --lerning-rate: did you mean --config.learning-rate?"),
    ("OWN --config name.yaml", "there is no --config.lr: did you mean --config.learning-rate?"),
    ("OWN --config type.yaml", "'many'"),
    ("OWN --config range.yaml", "PPOConfig.gamma is 3"),
    ("train --config env.yaml", "has the environment '--json'"),
    ("train CartPole-v1 Acrobot-v1", "Unrecognized options: Acrobot-v1"),
    ("train CartPole-v1 --chat", "--chat: only for prompts of your own"),
    ("train CartPole-v1 --lora r=2 --max-kl 1", "--max-kl and --lora: only for language models"),
    ("train textenv/Copy-v0 --prompts prompts.jsonl", "--prompts: only for prompts of your own"),
])  # fmt: skip
def test_wrong_input_is_refused_and_leaves_nothing(words, said, here, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = words.replace("OWN", OWN).split()
    with pytest.raises(SystemExit) as stop:
        main([*command, "--total-steps", "8", "--run-dir", str(here / "run")])
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert stop.value.code == 2 and said in shown
    assert not (here / "run").exists()


@pytest.mark.heavy
def test_a_corrected_reward_resumes_the_failed_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the film"}\n{"prompt": "a story"}\n')
    file = tmp_path / "fix.py"
    file.write_text("def f(completions):\n    return [1.0]\n")
    words = ["train", "--prompts", "prompts.jsonl", "--reward", "fix.py:f", "--total-steps", "40", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--run-dir", "R", "--config.num-episodes", "8", "--max-new-tokens", "4", "--num-episodes", "4"])
    assert ended.value.code == 2 and "returned 1 values for 8 completions" in capsys.readouterr().err
    file.write_text("def f(completions):\n    return [float(len(text)) for text in completions]  # corrected\n")
    main(["train", "--resume", "R", "--quiet"])
    assert (tmp_path / "R" / "policy").is_dir() and not (tmp_path / "R" / ".failed").exists()


def test_a_resume_tells_other_options_and_leaves_a_run_that_has_ended(here, capsys, caplog):
    """A shorter one replaced the options and the temperature of the run, without a word."""
    run = here / "run"
    main([*OWN.split(), *SHORT.split(), "--run-dir", str(run)])
    steps = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    options = (run / "run.yaml").read_bytes()
    description = (run / "config.json").read_bytes()
    resume = ["train", "--resume", str(run), "--reward", "rewards.py:short", "--temperature", "0.3", "--json"]

    # Nothing to train
    main([*resume, "--total-steps", "8"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == steps
    assert f"nothing is trained: the run has {steps} steps already, and 8 are asked for" in caplog.text
    assert "other options" not in caplog.text
    assert (run / "run.yaml").read_bytes() == options and (run / "config.json").read_bytes() == description
    assert load(run).temperature == 1

    # Trained on
    main([*resume, "--total-steps", str(steps + 8), "--sample-every", "3"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] > steps
    reward = f"--reward ['{here_name('short')}'] (before: ['{here_name('good')}'])"
    assert f"goes on with other options: {reward}, --temperature 0.3 (before: None)\n" in caplog.text
    assert yaml.safe_load((run / "run.yaml").read_text())["temperature"] == load(run).temperature == 0.3


def test_a_resume_tells_other_arguments_of_the_environment(here, capsys, caplog):
    run = here / "run"
    main([*OWN.split(), *SHORT.split(), "--run-dir", str(run)])
    steps = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    more = ["--total-steps", str(steps + 8), "--json"]
    main(["train", "--resume", str(run), *more, "--env-kwargs", '{"tool_timeout": 3}'])
    assert "goes on with other options: --env-kwargs {'tool_timeout': 3} (before: {})" in caplog.text


def here_name(function):
    """The absolute name of a reward in the present folder."""
    return str(Path.cwd() / f"rewards.py:{function}")


@pytest.mark.parametrize(
    "text, says",
    [
        ('overwrite = true\nenv = "CartPole-v1"\n', "sets overwrite, which is for the command line only"),
        ('resume = "R"\n', "sets resume, which is for the command line only"),
        ('env = "CartPole-v1"\ntotal_steps = [1]\n', "run.toml: total-steps is [1], expected a single value"),
        ('env = "CartPole-v1"\ntotal_steps = 1\ntotal-steps = 2\n', "has an option twice"),
    ],
)
def test_a_file_decides_neither_about_runs_nor_twice(tmp_path, capsys, text, says):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "X")])
    assert ended.value.code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "X").exists()


def test_an_empty_value_is_not_the_present_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["--run-dir", ""], ["--run-dir="], ["--prompts", "", "--reward", "a.py:f"]):
        with pytest.raises(SystemExit):
            main(["train", "CartPole-v1", "--total-steps", "64", *words])
        assert "is empty, expected a value" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_commands_print_one_json_object_last(tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    main(["train", "CartPole-v1", "--seed", "1", "--total-steps", "2048", "--run-dir", run_dir, "--json"])
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert trained["steps"] >= 2048 and trained["mean_return"] > 0 and trained["seconds"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = {"steps", "policy/approx_kl", "policy/clip_frac", "policy/entropy", "value/explained_variance"}
    assert expected | {"time/steps_per_second", "policy/loss", "value/loss"} <= lines[-1].keys()
    assert any("episode/return" in line for line in lines)
    main(["evaluate", run_dir, "--num-episodes", "3", "--deterministic", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 3


def test_wrong_input_exits_with_2_and_a_sentence(tmp_path, capsys):
    for arguments in (["train", "NoSuchEnv-v0"], ["evaluate", str(tmp_path)]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith("algos: ")


def test_a_bare_option_may_precede_the_environment(tmp_path, capsys):
    """Its preset is taken all the same, and the run resumes by its folder alone."""
    main(["train", "--overwrite", "--json", "CartPole-v1", "--total-steps", "256", "--run-dir", str(tmp_path)])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["environment"]["id"] == "CartPole-v1"
    assert config["config"]["learning_rate"] == presets.CARTPOLE.learning_rate != PPOConfig().learning_rate
    main(["train", "--json", "--resume", str(tmp_path), "--total-steps", "512"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] >= 512


@pytest.mark.heavy
def test_python_m_algos_explains_every_field():
    result = subprocess.run(
        [sys.executable, "-m", "algos", "train", "CartPole-v1", "--help"], capture_output=True, text=True, check=True
    )
    for field in PPOConfig.__dataclass_fields__:
        assert ("--seed " if field == "seed" else "--config." + field.replace("_", "-")) in result.stdout
    assert "0.98" in result.stdout, "the defaults are those of the environment's preset"
