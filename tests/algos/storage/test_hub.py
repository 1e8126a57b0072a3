"""Agents on the hub, against a server that speaks its endpoints; the client is huggingface_hub itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from huggingface_hub import ModelCard

import algos
from algos import PPO
from algos.lab.model_card import model_card
from tests.helpers.errors import refused
from tests.helpers.hub import TOKEN, running_hub, sha

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "/home/me/llama"}
PROGRAM = """
import json, sys
from pathlib import Path
import gymnasium
import algos
from algos import PPO
from algos.cli.evaluate import Merge
from algos.cli.sample import Sample
from algos.storage.hub import download

run, token = sys.argv[1:]
found = {}
def attempt(name, call):
    try:
        found[name] = call()
    except (OSError, ValueError) as error:
        found[name] = f"{type(error).__name__}: {error}"
attempt("no token", lambda: algos.push_to_hub(run, "me/cart"))
attempt("first", lambda: algos.push_to_hub(run, "me/cart", token=token))
attempt("again", lambda: algos.push_to_hub(run, "me/cart", token=token))
other = PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), seed=7)
attempt("agent", lambda: algos.push_to_hub(other.save(run + "-other"), "me/cart", token=token, overwrite=True))
weights = lambda policy: [p.flatten().tolist() for p in policy.parameters()]
found["own"], found["other"] = weights(algos.load(run)), weights(other.policy)
found["by name"] = weights(algos.load("me/cart"))
found["by revision"] = weights(algos.from_hub("me/cart", revision=found["first"].rpartition("/")[2]))
attempt("sample", lambda: Sample(folder="me/cart").run())
attempt("merge", lambda: Merge(folder="me/cart", to=Path("merged")).run())
attempt("unknown", lambda: algos.load("me/nothing"))
attempt("a revision", lambda: algos.from_hub("me/cart", revision="v9"))
attempt("code beside", lambda: type(algos.load("they/beside")).__name__)
found["files"] = sorted(path.name for path in download("they/beside").rglob("*") if path.is_file())
attempt("code asked for", lambda: algos.load("they/asks"))
found["imported"] = [name for name in ("evil", "antigravity") if name in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short training."""
    folder = tmp_path_factory.mktemp("runs") / "cart"
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    PPO(env, seed=1, num_steps=32, minibatch_size=32, learning_rate=1e-3).learn(128, run_dir=folder)
    return folder


@pytest.fixture(scope="module")
def story(run, tmp_path_factory):
    """What a program of its own, without a token at first, finds on a hub, and the hub afterwards."""
    home = tmp_path_factory.mktemp("home")
    with running_hub() as hub:
        good = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
        pickled = {"policy/evil.py": b"import antigravity", "policy/pytorch_model.bin": b"\x80\x04N."}
        hub.repos["they/beside"] = [good | pickled]
        config = json.loads(good["config.json"])
        config["environment"]["id"] = "antigravity:CartPole-v1"
        hub.repos["they/asks"] = [good | {"config.json": json.dumps(config).encode()}]
        env = {name: x for name, x in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)}
        command = [sys.executable, "-c", PROGRAM, str(run), TOKEN]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return json.loads(done.stdout), hub.repos


@pytest.mark.heavy
def test_a_pushed_agent_loads_by_name_or_revision(story):
    found, repos = story
    assert found["by revision"] == found["own"] and found["by name"] == found["other"] != found["own"]
    assert found["first"].endswith(sha("me/cart", 1)) and len(repos["me/cart"]) == 3
    # The second agent has no metrics, so those of the first are gone.
    assert set(repos["me/cart"][1]) - set(repos["me/cart"][2]) == {"metrics.jsonl"}


@pytest.mark.heavy
@pytest.mark.parametrize("command", ["sample", "merge"])
def test_commands_read_a_language_model_on_the_hub(story, command):
    assert "me/cart holds a MLPPolicy, but only a language model" in story[0][command]


def test_an_upload_has_no_checkpoints_nor_machine_data(story):
    files = story[1]["me/cart"][1]
    assert {name.partition("/")[0] for name in files} == {
        ".gitattributes", "README.md", "config.json", "metrics.jsonl", "policy"
    }  # fmt: skip
    made_by = json.loads(files["config.json"])["made_by"]
    assert made_by["versions"]["torch"] and not {"command", "folder", "machine"} & set(made_by)


@pytest.mark.parametrize(
    "name, words",
    [
        ("no token", ["could not be pushed to me/cart", "hf auth login", "HF_TOKEN"]),
        ("again", ["exists already", "overwrite=True"]),
        ("unknown", ["FileNotFoundError: there is no folder me/nothing", "no such repository", "agent.save"]),
        ("a revision", ["me/cart could not be loaded", "no such repository or revision"]),
    ],
)
def test_hub_errors_are_one_sentence_with_advice(story, name, words):
    with refused(OSError, *words):
        raise OSError(story[0][name])
    assert "\n" not in story[0][name]


def test_loading_from_the_hub_fetches_and_runs_no_code(story):
    found = story[0]
    assert found["code beside"] == "MLPPolicy" and found["files"] == ["config.json", "policy.safetensors"]
    assert "whose module would be imported" in found["code asked for"] and found["imported"] == []


def test_the_hub_reads_results_and_fields_of_the_card(run):
    card = ModelCard(model_card(run, "me/cart"))
    assert card.data.library_name == "textenv" and {"ppo", "CartPole-v1"} <= set(card.data.tags)
    (result,) = card.data.eval_results
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert result.dataset_name == "CartPole-v1"
    assert result.metric_value == pytest.approx(last["episode/return"], abs=1e-4)
    assert 'algos.load("me/cart")' in card.text and "| `learning_rate` | `0.001` |" in card.text
    assert "`gae_lambda`" not in card.text and "▁" in card.text


def test_the_best_agents_card_has_curves_and_score(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(run / "policy", tmp_path / "run" / "best" / "policy")
    shutil.copy(run / "config.json", tmp_path / "run" / "best")
    lines = [{"steps": steps, "eval/mean_return": score} for steps, score in ((10, 5.0), (20, 9.0), (30, 7.0))]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for folder, score in (("run", 7.0), ("run/best", 9.0)):
        assert ModelCard(model_card(tmp_path / folder, "me/cart")).data.eval_results[0].metric_value == score


def test_what_cannot_be_shared_is_refused_unsent(run, tmp_path):
    with refused(ValueError, "repo_id is 'cart'", "user/name"):
        algos.push_to_hub(run, "cart")
    with refused(FileNotFoundError, "holds no saved agent"):
        algos.push_to_hub(tmp_path, "me/cart")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "policy" / "adapter_config.json").write_text(json.dumps(ADAPTER))
    with refused(ValueError, "adapter of /home/me/llama", "algos merge"):
        algos.push_to_hub(tmp_path / "run", "me/cart")


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/at-all", "./a/b", "a/b/c", "../a", "tests/nowhere"])
def test_a_wrong_folder_is_no_name_on_the_hub(name):
    with refused(FileNotFoundError, "holds no saved agent", "agent.save"):
        algos.load(name)


def test_a_name_without_a_network_is_one_sentence():
    """The suite runs with HF_HUB_OFFLINE."""
    with refused(FileNotFoundError, "there is no folder nobody/nothing", "hub cannot be reached"):
        algos.load("nobody/nothing")


@pytest.mark.parametrize("name", ["metrics.jsonl", "policy/notes.txt"])
def test_a_link_out_of_the_folder_is_not_published(name, run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    secret = tmp_path / "secret"
    secret.write_text("key")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with refused(ValueError, f"{name} is a link to {secret}", "would be published"):
        algos.push_to_hub(folder, "me/cart")
