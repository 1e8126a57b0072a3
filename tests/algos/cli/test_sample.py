"""``algos sample``: what a trained model writes, beside the model that it started from."""

import io
import json
import shutil

import gymnasium
import pytest
import torch
from transformers import AutoTokenizer

from algos import PPO, LMPolicy, load
from algos.cli import main
from algos.cli.sample import check_model_name
from algos.storage.run_folder import checkpoints, lock_run_folder
from tests.helpers.resumable_agents import ppo_cartpole
from textenv.registration import make_vector_env


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An agent whose model writes something else than the one that it started from."""
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=2)
    policy = LMPolicy.load("embedded", temperature=0.1)
    with torch.no_grad():
        for parameter in policy.lm.model.parameters():
            parameter.mul_(0.5)
    return PPO(env, policy, num_steps=None, num_episodes=2).save(tmp_path_factory.mktemp("run"))


def found(capsys, *words):
    capsys.readouterr()
    main(["sample", *map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)["samples"]


@pytest.mark.heavy
def test_prompts_are_completed_beside_the_base_model(run, capsys):
    words = [run, "--prompt", "the film", "--prompt", "a story", "--compare-to", "base", "--max-new-tokens", "12"]
    first, second = found(capsys, *words)
    assert list(first) == ["prompt", "base", str(run)] and first["prompt"] == "the film"
    for number, row in enumerate((first, second)):
        base = LMPolicy.load("embedded", temperature=0.1)
        for name, policy in (("base", base), (str(run), load(run))):
            assert policy.generate([row["prompt"]], max_new_tokens=12, seed=number) == [row[name]]
        assert row["base"] != row[str(run)]
    assert found(capsys, *words) == [first, second], "the same command writes the same"
    capsys.readouterr()
    main(["sample", *map(str, words)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "the film" in shown and "base" in shown and first["base"].split()[0] in shown


def test_typed_lines_are_completed_until_input_ends(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the film\n\na story\n"))
    main(["sample", str(run), "--json", "--max-new-tokens", "8"])
    rows = json.loads(capsys.readouterr().out)["samples"]
    assert [row["prompt"] for row in rows] == ["the film", "a story"]


@pytest.mark.heavy
def test_a_chat_remembers_what_was_said(tmp_path, capsys, monkeypatch):
    policy = LMPolicy.load("embedded")
    policy.lm.tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    PPO(make_vector_env("Copy"), policy, num_steps=None, num_episodes=2).save(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    main(["sample", str(tmp_path), "--system-prompt", "be kind", "--json", "--max-new-tokens", "8"])
    first, second = (row[str(tmp_path)] for row in json.loads(capsys.readouterr().out)["samples"])
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert policy.generate([chat], max_new_tokens=8, seed=0) == [first]
    chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    assert policy.generate([chat], max_new_tokens=8, seed=1) == [second]
    assert policy.generate([chat[-1:]], max_new_tokens=8, seed=1) != [second], "the chat before it matters"


def test_a_prompt_without_the_chat_of_the_training_is_warned_of(run, tmp_path, caplog):
    shutil.copytree(run, tmp_path / "best")
    (tmp_path / "run.yaml").write_text("env: textenv/Prompts-v0\nalgo: ppo\nchat: true\nconfig: {}\n")
    main(["sample", str(tmp_path / "best"), "--prompt", "the film", "--json", "--max-new-tokens", "2"])
    assert "the run was trained on chats, which this prompt is not: --chat" in caplog.text
    caplog.clear()
    main(["sample", str(run), "--prompt", "the film", "--json", "--max-new-tokens", "2"])
    assert "chats" not in caplog.text


SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "2 + 2?"}
BRIEFLY = "--system-prompt 'Be brief.' asks as in the training"
TRAINED_ON_CHATS = "the run was trained on chats, which this prompt is not: "


@pytest.mark.parametrize(
    ("option", "chat", "flags", "warning"),
    [
        ("chat: true", None, [], f"{TRAINED_ON_CHATS}--chat asks"),
        ("system_prompt: Be brief.", None, [], f"{TRAINED_ON_CHATS}{BRIEFLY}"),
        ("system_prompt: Be brief.", None, ["--chat"], f"chats of the training began with a system message: {BRIEFLY}"),
        ("system_prompt: Be brief.", None, ["--system-prompt", "Be kind."], None),
        ("chat: false", [QUESTION], [], f"{TRAINED_ON_CHATS}--chat asks"),
        ("chat: false", [QUESTION], ["--chat"], None),
        ("chat: false", [SYSTEM, QUESTION], [], f"{TRAINED_ON_CHATS}{BRIEFLY}"),
        ("chat: false", [SYSTEM, QUESTION], ["--chat"], BRIEFLY),
        ("chat: false", ["no message"], ["--chat"], None),
        ("chat: false", [], [], None),
    ],
)
def test_flags_that_ask_as_in_the_training_are_told(option, chat, flags, warning, run, tmp_path, caplog):
    """Of prompts that are chats themselves there was no word, and --chat left out the system message."""
    folder = tmp_path / "chats"
    shutil.copytree(run, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder / "policy")
    (folder / "run.yaml").write_text(f"env: textenv/Prompts-v0\nalgo: ppo\n{option}\nconfig: {{}}\n")
    (folder / "samples.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "chat": chat}) + "\n")
    main(["sample", str(folder), "--prompt", "2 + 2?", "--json", "--max-new-tokens", "2", *flags])
    if warning is None:
        assert "in the training" not in caplog.text
    else:
        assert warning in caplog.text


@pytest.mark.parametrize(
    "words, says",
    [
        (["nowhere", "--prompt", "x"], "nowhere holds no saved agent"),
        (["RUN", "--prompt", ""], "prompt 0 is empty"),
        (["RUN", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens is 0, expected an integer of at least 1"),
        (["RUN", "--prompt", "x", "--compare-to", "missing"], "there is no folder missing: give"),
        (["RUN", "--prompt", "x", "--compare-to", "tests/missing"], "there is no folder tests/missing: give"),
        (["RUN", "--prompt", "x", "--compare-to", "a/b/c"], "there is no folder a/b/c: give"),
        (["RUN", "--prompt", "x", "--compare-to", "SmolM2"], "did you mean 'smollm2'?"),
        (["RUN", "--prompt", "x", "--chat"], "has no chat template"),
        (["RUN", "--prompt", "x", "--seed", "-1"], "seed is -1, expected an integer of at least 0"),
        (["RUN", "--prompt", "x", "--compare-to", "RUN"], "the run itself: name another model, or base"),
        (["RUN", "--prompt", "x", "--compare-to", "RUN/."], "the run itself"),
    ],
)
def test_wrong_input_ends_with_one_sentence(run, words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sample", *(word.replace("RUN", str(run)) for word in words)])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_the_hub_is_announced_before_it_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check_model_name("nobody/nothing")
    assert "no folder nobody/nothing, so the hub is asked" in capsys.readouterr().err
    (tmp_path / "nobody").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder nobody/nothing: give"):
        check_model_name("nobody/nothing")


def test_a_run_of_control_writes_no_texts(tmp_path, capsys):
    folder = ppo_cartpole().save(tmp_path)
    with pytest.raises(SystemExit):
        main(["sample", str(folder), "--prompt", "x"])
    assert "only a language model writes texts" in capsys.readouterr().err


@pytest.mark.heavy
def test_stops_of_training_and_of_the_flag_end_answers(tmp_path, capsys):
    policy = LMPolicy.load("embedded")
    PPO(make_vector_env("Periods", stop=["."]), policy, num_steps=None, num_episodes=2).save(tmp_path)
    words = [tmp_path, "--prompt", "the film", "--max-new-tokens", "40", "--compare-to", "embedded"]
    (whole,) = LMPolicy.load("embedded").generate(["the film"], max_new_tokens=40, seed=0)
    assert "." in whole
    (row,) = found(capsys, *words)
    assert row[str(tmp_path)] == row["embedded"] == whole.partition(".")[0]
    letter = whole[len(whole) // 2]
    (row,) = found(capsys, *words, "--stop", letter, "--stop", "~")
    assert row[str(tmp_path)] == row["embedded"] == whole.partition(letter)[0]


@pytest.mark.heavy
def test_a_running_run_is_read_from_a_checkpoint(tmp_path, capsys):
    """Its older agent, of an interruption, is left alone while the run goes on."""
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=4, max_new_tokens=4)
    agent = PPO(env, LMPolicy.load("embedded"), num_steps=None, num_episodes=4, minibatch_size=4, learning_rate=1e-2)
    agent.learn(40, run_dir=tmp_path, checkpoint_every=8)
    early, late = checkpoints(tmp_path)
    newest = LMPolicy.load(tmp_path / "policy").generate(["the film"], max_new_tokens=6)
    LMPolicy.load("embedded").save(tmp_path / "policy")
    old = LMPolicy.load(tmp_path / "policy").generate(["the film"], max_new_tokens=6)
    words = ["--prompt", "the film", "--max-new-tokens", "6"]

    def written(folder):
        (row,) = found(capsys, folder, *words)
        return [row[str(folder)]]

    assert written(tmp_path) == old != newest, "a run that has ended has its own agent"
    with lock_run_folder(tmp_path, resumed=True):
        assert written(tmp_path) == newest
        capsys.readouterr()
        main(["evaluate", str(tmp_path), "--num-episodes", "2", "--json"])
        shown = capsys.readouterr()
        assert json.loads(shown.out)["checkpoint"] == str(late)
        assert f"{tmp_path} has not ended: this is its newest checkpoint, {late.name}" in shown.err
    (tmp_path / "config.json").unlink()  # killed before it saved an agent
    assert written(tmp_path) == newest
    assert written(late) == newest and written(early), "a checkpoint may be named, too"
