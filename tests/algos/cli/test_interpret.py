"""``algos interpret``: a page about what training changed in a language model."""

import csv
import json

import gymnasium
import pytest
import torch

from algos import PPO, LMPolicy, presets
from algos.cli import main
from algos.recipe import Recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An agent whose model differs from the embedded one in one MLP, which now writes " a" instead of " truly"."""
    policy = LMPolicy.load("embedded")
    words = policy.lm.model.get_output_embeddings().weight
    one, other = (words[policy.tokenizer.encode(word)[0]] for word in (" a", " truly"))
    with torch.no_grad():
        policy.lm.model.transformer.h[1].mlp.c_proj.bias += 10 * (one - other) / (one - other).norm()
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=2)
    return PPO(env, policy, num_steps=None, num_episodes=2).save(tmp_path_factory.mktemp("run"))


def said(capsys, *words):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["interpret", *map(str, words)])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.heavy
def test_a_second_call_replaces_tables_and_page(run, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ["the film", "a story"] * 2))
    words = [
        "interpret",
        str(run),
        "--prompt",
        "the film was",
        "--prompts",
        str(prompts),
        "--tokens",
        " a",
        " truly| film",
    ]
    main([*words, "--neurons", "2", "--model", "base", "--model", "embedded", "--json"])
    found = json.loads(capsys.readouterr().out)
    (row,) = found["logit_difference"]
    assert row["embedded"] == row["base"] != row[str(run)] and row["low"] <= row["change"] <= row["high"]
    assert found["parts"][0]["part"] == "layer 1 mlp" and {x["change"] for x in found["heads"]} != {0.0}
    (share,) = (x["share"] for x in found["patching"] if x["place"] == "layer 1 mlp")
    assert share == pytest.approx(1, abs=1e-3) and len(found["neurons"]) == 2
    main(words)
    folder = run / "interpret"
    assert "Logit lens" in capsys.readouterr().out and not (folder / "neurons.csv").exists()
    assert {"heads.csv", "heads.png", "parts.png", "attention.png"} <= {x.name for x in folder.iterdir()}
    page = (folder / "interpret.html").read_text()
    assert 'src="heads.png"' in page and "layer 1 mlp" in page
    with (folder / "heads.csv").open() as file:
        assert next(csv.reader(file))[:2] == ["layer", "head"]


def test_wrong_input_is_answered_with_a_sentence(run, tmp_path, capsys):
    tokens = ["--tokens", " a", " film"]
    assert "' wonderful film' is" in said(capsys, run, "--prompt", "the", "--tokens", " wonderful film", " a")
    assert "add --prompt TEXT" in said(capsys, run, *tokens) and "--tokens" in said(capsys, run, "--prompt", "the")
    assert "there is no folder" in said(capsys, tmp_path / "none", "--prompt", "the", *tokens)
    assert "--model is" in said(capsys, run, "--prompt", "the", "--model", str(run), *tokens)
    assert "there is no file" in said(capsys, run, "--prompts", str(tmp_path / "none.jsonl"), *tokens)


@pytest.mark.heavy
def test_it_reads_control_policies_too(run, tmp_path, capsys):
    recipe = Recipe(env="CartPole-v1", config=presets.PPOConfig(num_steps=16, minibatch_size=32), num_envs=2)
    agent = recipe.build(3)
    agent.learn(32)
    folder = agent.save(tmp_path / "run")
    main(["interpret", str(folder), "--json", "--env", "CartPole-v1", "--dims", "0", "1"])
    found = json.loads(capsys.readouterr().out)
    assert {x["observation"] for x in found["sensitivity"]} >= {"angle", "(unexplained)"}
    assert {"output", "position", "velocity"} <= found["map"][0].keys()
    assert {"sensitivity.png", "hidden_units.csv", "map.png"} <= {x.name for x in (folder / "interpret").iterdir()}
    assert 'src="map.png"' in (folder / "interpret" / "interpret.html").read_text()
    assert "--prompt, --neurons: not for" in said(capsys, folder, "--prompt", "the", "--neurons", "3")
    assert "dims (0, 7)" in said(capsys, folder, "--dims", "0", "7")
    text = ["--prompt", "the", "--tokens", " a", " film", "--model", str(folder)]
    assert "--dims: not for" in said(capsys, run, *text, "--dims", "0", "1")
    assert "but only a language model" in said(capsys, run, *text)
