"""Every script of examples/ in miniature: that it runs, and what it teaches. A newcomer begins by copying one of them.

Data are a few lines written here in the format of the real ones. What rises must rise by about a third of what it was
seen to rise by, so that no result depends on the machine's rounding.
"""

import dataclasses
import functools
import gc
import json
import math
import random
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

from algos import LMPolicy, evaluate, presets
from algos.cli import main as command_line
from tests.helpers.models import EXAMPLES, load_example
from textenv import LanguageModel, TextVectorEnv

DATA = EXAMPLES.parents[1] / "shared" / "data"


def test_every_example_is_run_here():
    files = (Path(__file__), Path(__file__).with_name("test_notebooks.py"))
    run = {name for file in files for name in re.findall(r'load_example\("(\w+)"\)', file.read_text())}
    assert run == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.heavy
def test_the_figure_of_the_readme_is_made(tmp_path):
    path = tmp_path / "figure.svg"
    load_example("front_page").main(
        path, seeds=[1], frontier_seeds=[1], coefficients=[0.1], steps=2_000, text_steps=2_000
    )
    assert "<svg" in path.read_text()


def shown(output, name):
    """The numbers that a script printed after this word, one a line of its log."""
    return [float(number) for number in re.findall(rf"steps.* {name} +([-+.\d]+)", output)]


def write(path, lines):
    """A file of these lines; a mapping becomes JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def reviews(count, seed):
    """Sentences of seven words and more, which one word makes liked or disliked."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        label = rng.randrange(2)
        said = rng.choice([["dull", "poor"], ["great", "fine"]][label])
        parts = [
            rng.choice("abcdefghijklmnopqrst"),
            rng.choice(["new", "old"]),
            rng.choice(["film", "plot", "cast"]),
            "is",
        ]
        rows.append((" ".join([*parts, "very", said, "and", rng.choice(["long", "short", "loud"])]), label))
    return rows


def write_sst2(folder, count):
    """train.tsv and dev.tsv: no beginning of three words stands in both, and two words tell the label."""
    dev = reviews(100, seed=2)
    taken = {tuple(text.split()[:3]) for text, _ in dev}
    train = [(text, label) for text, label in reviews(count, seed=1) if tuple(text.split()[:3]) not in taken]
    for name, rows in {"train.tsv": train, "dev.tsv": dev}.items():
        write(folder / name, [f"{text} , a {('weak', 'warm')[label]} one\t{label}" for text, label in rows])


# --- control ---------------------------------------------------------------------------------------------------------


def by_command_line(env_id, *, total_steps, num_episodes, run_dir, capsys):
    """Mean return that `algos train` prints at the end."""
    words = ["--seed", "1", "--total-steps", str(total_steps), "--num-episodes", str(num_episodes), "--json"]
    command_line(["train", env_id, *words, "--run-dir", str(run_dir)])
    return json.loads(capsys.readouterr().out.splitlines()[-1])["mean_return"]


@pytest.mark.heavy
def test_cartpole_is_learnt_as_by_the_command_line(tmp_path, capsys):
    returns = load_example("cartpole").main(total_steps=6_000)
    first, *_, last = shown(capsys.readouterr().out, "return")
    assert last > first + 25 and np.mean(returns) > first + 60
    same = by_command_line("CartPole-v1", total_steps=6_000, num_episodes=20, run_dir=tmp_path, capsys=capsys)
    assert np.mean(returns) == same


@pytest.mark.heavy
def test_text_is_learnt_as_by_the_command_line(tmp_path, capsys):
    returns = load_example("text").main(total_steps=1_500)  # one iteration
    (untrained,) = shown(capsys.readouterr().out, "return")
    assert 0.4 < untrained < 0.65 and np.mean(returns) > untrained + 0.07
    same = by_command_line("textenv/Reviews-v0", total_steps=1_500, num_episodes=288, run_dir=tmp_path, capsys=capsys)
    assert np.mean(returns) == same


def test_the_twins_differ_in_three_things():
    """They are short; environment, policy and preset differ."""
    one, two = ((EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("cartpole", "text"))
    assert max(len(one), len(two)) < 60
    code = [[line for line in file[file.index("import gymnasium") :] if line.strip()] for file in (one, two)]
    different = set(code[0]) ^ set(code[1])
    assert all(
        any(word in line for word in ("make_vec", "olicy", "presets", "print", "textenv", "evaluate(", "main("))
        for line in different
    ), different


@pytest.mark.heavy
def test_a_recurrent_policy_learns_without_velocities(capsys):
    example = load_example("hidden_velocities")
    env, plain = example.make_env(3), gymnasium.make_vec("CartPole-v1", num_envs=3)
    np.testing.assert_array_equal(env.reset(seed=5)[0], plain.reset(seed=5)[0][:, [0, 2]])
    assert len(example.main(total_steps=12_000)) == 20
    first, *_, last = shown(capsys.readouterr().out, "return")
    assert last > first + 6


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "preset"), [("cartpole", "CARTPOLE"), ("hidden_velocities", "CARTPOLE_LSTM")])
def test_an_iteration_without_an_end_has_no_return(name, preset, capsys):
    example = load_example(name)
    example.presets = SimpleNamespace(**{preset: dataclasses.replace(getattr(presets, preset), num_steps=4)})
    example.main(total_steps=2_000)  # no pole falls in the first 4 steps
    output = capsys.readouterr().out
    assert "nan" not in output and len(shown(output, "return")) > 3


@pytest.mark.heavy
def test_a_policy_learns_the_custom_environment(capsys):
    before, after = load_example("custom_environment").main(total_steps=6_000)
    assert np.mean(after) > np.mean(before) + 3
    assert f"{np.mean(before):.2f} before, {np.mean(after):.2f} after" in capsys.readouterr().out


@pytest.mark.long
def test_a_failing_world_costs_the_zoo_one_row(tmp_path, capsys, monkeypatch):
    zoo = load_example("zoo")
    assert len(zoo.WORLDS) >= 20 and {world.kind for world in zoo.WORLDS.values()} == set(zoo.KINDS)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    short = ["--seeds", "1", "--budget", "0.001", "--run-dir", str(tmp_path)]
    (trained,) = zoo.main(["--worlds", "CartPole", *short])
    assert trained[:2] == ["CartPole", "MLPPolicy"] and float(trained[2]) > 0 and trained[-2] == "held"
    failed = zoo.row_of("Gone", zoo.World("Gone-v0", "numbers", 1), {"not run": "no | such world"})
    assert failed[-2] == "not run: no \\| such world" and len(failed) == len(trained)
    assert (tmp_path / "zoo.md").read_text().count("| held |") == 1
    zoo.train_one("Blackjack", zoo.WORLDS, seeds=1, budget=0.001, run_dir=tmp_path)  # what that process does
    other = zoo.row_of("Blackjack", zoo.WORLDS["Blackjack"], json.loads((tmp_path / "Blackjack.json").read_text()))
    assert other[:2] == ["Blackjack", "MLPPolicy"] and other[-2] == "held"
    with pytest.raises(SystemExit):
        zoo.main(["--worlds", "CartPol"])
    assert "there is no world CartPol: the worlds are CartPole, Acrobot" in capsys.readouterr().err


@pytest.mark.long
def test_shaped_rewards_are_compared_by_steps(tmp_path):
    example = load_example("shaped_rewards")
    env = gymnasium.make("CartPole-v1")
    paid = {kind: kind(env).shape(1.2, 0.0, 0.0, 0.0) for kind in (example.Angle, example.Position, example.Product)}
    assert list(paid.values()) == [1, 0.5, 0.5] and example.Energy(env).shape(0, 0, 0, 0) == 1
    assert example.Energy(env).shape(0, 0, 0, 3.0) == pytest.approx(1 - 3 / 9.8)
    wrapped = example.Position(env)
    wrapped.reset(seed=1)
    _, reward, *_ = wrapped.step(0)
    assert 0.97 < reward < 1
    rows = example.main(seeds=1, total_steps=600, run_dir=tmp_path, processes=0)
    assert list(rows) == ["none", "angle", "position", "product", "energy"]
    for (steps,), upright, steady, central in rows.values():
        assert steps == 600 and 8 < upright <= 500 and 0 <= steady <= 1 and 0 <= central <= 1


# --- text by the embedded model --------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_custom_reward_is_learnt_in_30_lines(capsys):
    assert (EXAMPLES / "custom_reward.py").read_text().count("\n") < 30
    load_example("custom_reward").main(total_steps=5_000)
    first, *_, last = shown(capsys.readouterr().out, "reward")
    assert last > first + 0.1


@pytest.mark.long
def test_the_form_is_shown_before_copying_is_learnt():
    before, after_sft, _ = load_example("copy_and_sort").main("Copy", total_steps=100)
    assert before < 0.01 and after_sft > 0.06


@pytest.mark.long
def test_a_custom_task_is_learnt():
    first, *_, last = [metrics["episode/return"] for metrics in load_example("custom_task").main(total_steps=4_500)]
    assert last > first + 0.07


@pytest.mark.long
def test_a_composite_reward_is_learnt_by_parts(capsys):
    load_example("composite_reward").main(total_steps=5_000)
    output = capsys.readouterr().out
    parts = [shown(output, name) for name in ("sentiment", "music", "length", "repetition")]
    np.testing.assert_allclose(np.sum(parts, axis=0), shown(output, "score"), atol=0.03)  # of two decimals each
    assert shown(output, "score")[-1] > shown(output, "score")[0] + 0.1


@pytest.fixture(scope="module")
def distil():
    """The example, which trains one teacher for all tests: no student changes it."""
    example = load_example("distil")
    example.train_teacher = functools.cache(example.train_teacher)
    return example


@pytest.mark.parametrize(
    ("way", "share"),
    [
        pytest.param("loss", 0.77, marks=pytest.mark.long),
        pytest.param("token", 0.87, marks=pytest.mark.slow),
        pytest.param("sft", 0.74, marks=pytest.mark.long),
    ],
)
def test_a_student_comes_near_its_teacher(way, share, distil, capsys):
    """In miniature: the KL a token as a share of that before; seen: .31, .62 and .22."""
    figures = distil.main(way, 10_000, warm_up=10_000, teacher_steps=4_500)
    assert abs(figures["teacher"]["KL, nats a token"]) < 1e-6
    assert figures["after"]["KL, nats a token"] < share * figures["before"]["KL, nats a token"]
    assert f"KL, nats a token{figures['teacher']['KL, nats a token']:14.3f}" in capsys.readouterr().out


@pytest.mark.long
def test_a_conversation_is_learnt_and_shown(capsys):
    load_example("conversation").main(total_steps=12_000)
    output = capsys.readouterr().out
    first, *_, last = shown(output, "return")
    assert last > first + 0.06
    assert [output.count(f"the {thing} ?") for thing in ("music", "plot", "ending")] == [4, 4, 4]


@pytest.mark.long
def test_a_game_of_textarena_is_learnt(capsys):
    pytest.importorskip("textarena")
    load_example("textarena_game").main(total_steps=600, most=3)
    first, *_, last = shown(capsys.readouterr().out, "reward")
    assert last > first + 0.08


class Person:
    """Answers thumbs up and down in turn; keeps what it was asked."""

    name = "script"

    def __init__(self):
        self.questions = []

    def ask(self, question):
        self.questions.append(question)
        return "down" if question.number % 2 else "up"


@pytest.mark.long
def test_human_feedback_goes_on_from_its_file(tmp_path, capsys):
    assert (EXAMPLES / "human_feedback.py").read_text().count("\n") < 60
    example, path, person = load_example("human_feedback"), tmp_path / "thumbs.jsonl", Person()
    example.main(total_steps=5_000, annotator=person, file=path)
    output = capsys.readouterr().out
    first, *_, last = shown(output, "reward")
    assert last > first + 0.13
    assert 4 <= len(person.questions) == len(path.read_text().splitlines()) <= 12
    assert f"{len(person.questions)} thumbs in {path}" in output
    example.main(total_steps=300, annotator=(again := Person()), file=path)
    assert again.questions == []


@pytest.mark.heavy
def test_minds_play_the_same_world(tmp_path, monkeypatch, capsys):
    minds = "mlp;scratch;embedded, scrambled"
    figure = tmp_path / "figure.svg"
    data = tmp_path / "minds.json"
    options = ["--games", "lake", "--minds", minds, "--seeds", "1", "--json", str(data), "--figure", str(figure)]
    monkeypatch.setattr("sys.argv", ["same_world.py", *options])
    example = load_example("same_world")
    monkeypatch.setattr(example, "RUNS", tmp_path / "runs" / "minds.jsonl")
    monkeypatch.setattr(example, "EPISODES", 4)
    monkeypatch.setitem(example.GAMES, "lake", dataclasses.replace(example.GAMES["lake"], steps=1024))
    example.main()
    runs = [json.loads(line) for line in example.RUNS.read_text().splitlines()]
    assert [run["mind"] for run in runs] == ["mlp", "scratch", "embedded, scrambled"]
    assert all(run["steps"] >= 1024 and -0.02 < run["after"] <= 1 for run in runs)
    example.main()
    assert len(example.RUNS.read_text().splitlines()) == 3, "a run that is there is not repeated"
    assert capsys.readouterr().out.count("| lake | scratch | 1 |") == 2
    assert figure.read_text().count("<use ") >= 6, "a mark for each run, and one for the median of each mind"

    # The file of docs/results has the runs, too
    assert json.loads(data.read_text())["runs"] == runs
    example.RUNS.unlink()
    example.main()
    assert not example.RUNS.is_file()

    # Scrambled texts have other words in the same places, always the same
    game = example.GAMES["lake"]
    plain = example.make_policy(game, game.make(1), "embedded", 0)
    scrambled = example.Scrambled(game, plain)
    assert sorted(scrambled.other) == sorted(scrambled.other.values())
    assert all(word != other for word, other in scrambled.other.items())
    for cell in range(16):
        words = re.findall("[a-z]+", plain.describe(cell).lower())
        assert [scrambled.other[word] for word in words] == re.findall("[a-z]+", scrambled(cell).lower())


# --- data sets -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_adds_numbers_before_training(capsys):
    load_example("arithmetic").main(total_steps=1)
    before, after = re.findall(r"right (?:before|after): (\S+)", capsys.readouterr().out)
    assert 0.4 < float(before) < 0.9 and float(after) > float(before) - 0.15


@pytest.mark.slow
def test_smollm2_rates_what_smollm2_writes(capsys):
    num_right, before, after = load_example("judge").main(iterations=1, num_episodes=8)
    output = capsys.readouterr().out
    assert num_right > 4, "a judge that says always the same is right about half"
    assert 1 <= before <= 5 and 1 <= after <= 5 and output.count(" | ") == 6 and "calls, " in output


@pytest.mark.slow
def test_smollm2_has_a_calculator_to_call(capsys):
    example = load_example("tools")
    assert example.calculate("12 * 34") == 408
    assert example.called(["6", "6"], [[{"result": "6"}], [{"result": "7"}]]) == [1, 0]
    (metrics,) = example.main(iterations=1, episodes=2)
    assert metrics["tools/calls"] >= metrics["tools/errors"] and 0 <= metrics["episode/return"] <= 1
    assert "right calls" in capsys.readouterr().out


@pytest.mark.slow
def test_the_judge_tells_praise_from_blame(capsys):
    example = load_example("film_reviews")
    found = example.run("rloo", 1, 1, {})
    assert abs(found["before"]["KL, nats an answer"]) < 1e-3 and capsys.readouterr().out.count(" after: ") == 8
    judge = example.asked(LanguageModel.load("smollm2"))
    good, bad = judge(["The film was", "The film was"], [" a wonderful, moving masterpiece.", " awful and boring."])
    assert good > bad + 0.3


@pytest.mark.slow
def test_repetition_costs_only_with_a_weight(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = load_example("negative_reviews")
    assert example.echoes(["a b c", "A b d", "e f", "x"]) == [-0.5, -0.5, 0, 0]
    monkeypatch.setattr("film_reviews.UNSEEN", ["this comedy"])
    before, after, texts = example.run(1, 1, 0.5)
    assert before.keys() == after.keys() >= {"VADER", *example.PENALTIES} and len(texts) == 14
    assert before["words"] <= 0 and -1 <= before["echoes"] <= 0


@pytest.mark.slow
def test_the_better_overlap_is_preferred(tmp_path, monkeypatch, capsys):
    """PPO is paid by the reward model that learnt it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = load_example("summaries")
    assert example.overlap("a new film", "This is a new film") == 1 and example.overlap("a b", "a c") == 0.5
    assert example.overlap("a " * 16, "a film") == 0.5 and example.overlap("", "a film") == 0
    rows = [
        (" ".join(f"{text} , {other} , {text}".split()[:15]), label)
        for (text, label), (other, _) in zip(*[iter(reviews(16, 3))] * 2, strict=True)
    ]
    for name in ("train", "dev"):
        write(tmp_path / "sst2" / f"{name}.tsv", [f"{name} {text}\t{label}" for text, label in rows])
    monkeypatch.setattr(example, "CONFIG", dataclasses.replace(example.CONFIG, num_episodes=2, minibatch_size=2))
    example.main(tmp_path, sentences=7, total_steps=1)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 2 <= said["pairs"] <= 7 and -1 <= said["after"]["judge: similarity"] <= 1
    assert abs(said["before"]["KL, nats an answer"]) < 1e-3


@pytest.mark.heavy
def test_praise_and_blame_are_compared_over_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = load_example("interpret_sentiment")
    monkeypatch.setattr(example, "CASES", {name: example.CASES[name] for name in ("positive", "negative")})
    example.main("embedded", [1, 2], 3_000, tmp_path)
    said = capsys.readouterr().out
    changed = re.search(r"change of the difference \| (\S+) .*?\| (\S+) ", said)
    assert float(changed[1]) > 0.6 and float(changed[2]) < -0.6  # seen: 2.0 and -2.2
    assert said.count("layer 1 head 0") == 4
    rows = re.findall(r"\| positive \| (\S+) .*?\| (\S+) ", said)
    assert len(rows) == 2 and all(float(same) > 0.5 and float(other) < -0.5 for same, other in rows)
    page, folder = tmp_path / "embedded-study" / "interpret.html", tmp_path / "embedded" / "positive-1"
    assert 'src="heads.png"' in page.read_text() and (folder / "interpret" / "heads.csv").is_file()
    trained = (folder / "policy").stat().st_mtime_ns
    example.main("embedded", [1], 3_000, tmp_path)
    assert (folder / "policy").stat().st_mtime_ns == trained  # a finished run is read


@pytest.mark.long
def test_reward_models_learn_thumbs_scores_and_pairs(tmp_path, monkeypatch, capsys):
    write_sst2(tmp_path / "sst2", 1_400)
    scored, pairs = [], []
    for n in range(500):
        prompt, wrong = f"A box has {n} balls. Two more?", f"I guess about {n + 9}, who knows"
        right = f"{n}+2=<<{n}+2={n + 2}>>{n + 2}\nA: {n + 2}"
        scored += [{"prompt": prompt, "completion": text, "score": score} for score, text in enumerate((wrong, right))]
        pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong})
    write(tmp_path / "gsm8k" / "scored.jsonl", scored)
    write(tmp_path / "gsm8k" / "preferences.jsonl", pairs)
    monkeypatch.setattr("sys.argv", ["reward_model.py", "--data", str(tmp_path)])
    example = load_example("reward_model")
    example.main()
    table = {line[:14].strip(): line[14:].split() for line in capsys.readouterr().out.splitlines()}
    (*_, chance, accuracy, _, rank, _), (*_, scores_rank, _) = table["SST-2, thumbs"], table["GSM8K, scores"]
    assert float(accuracy) > float(chance) + 0.15 and float(rank) > 0.3 and float(scores_rank) > 0.3
    assert float(table["GSM8K, pairs"][3]) > 0.67
    tokenizer = example.make_tokenizer(["a film"], size=300)
    ids = example.make_reward_model(tokenizer).encode("a <cls>", " <pad>")
    assert ids[0] == tokenizer.cls_token_id and not {tokenizer.cls_token_id, tokenizer.pad_token_id} & set(ids[1:])


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("reward_model", "/sst2/train.tsv"),
        ("rlhf", "/sst2/train.tsv"),
        ("sst2_sentiment", " has no train.tsv"),
        ("summaries", "/sst2/train.tsv"),
        ("film_reviews", "/sst2/train.tsv"),
    ],
)
def test_data_that_is_not_there_is_named(name, missing, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--data", f"{tmp_path}/absent"])
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert f"{tmp_path}/absent{missing}: docs/results/real-text.md says " in capsys.readouterr().err


@pytest.fixture
def sst2():
    return load_example("sst2_sentiment")


def test_sst2_sentences_end_with_the_id_of_eos(sst2):
    texts = ["a good film", "an <eos> in the text", "long " * 100]
    tokenizer = sst2.make_tokenizer(texts, size=300)
    first, second, third = sst2.sentence_ids(texts, tokenizer)
    for ids, text in ((first, texts[0]), (second, texts[1])):
        assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[:-1]) == text
    assert len(third) == sst2.CONTEXT and tokenizer.eos_token_id not in third, "what was cut off has not ended"


@pytest.mark.heavy
def test_the_sst2_model_ends_its_sentences(sst2, monkeypatch):
    monkeypatch.setattr(sst2, "HELD_OUT", 60)
    texts = [text for text, _ in reviews(360, seed=1)]
    tokenizer = sst2.make_tokenizer(texts, size=4096)
    policy = LMPolicy(sst2.train_language_model(texts, tokenizer), tokenizer)
    prompts = [" ".join(text.split()[:3]) for text in texts[:64]]
    env = TextVectorEnv(
        prompts=prompts, reward=lambda completions: [0.0] * len(completions), tokenizer=tokenizer, num_envs=64,
        max_new_tokens=16,
    )  # fmt: skip
    _, rollout = evaluate(env, policy, num_episodes=64)
    assert rollout["terminated"].any(1).float().mean() > 0.5


@pytest.mark.long
def test_ppo_raises_the_score_on_sst2(sst2, tmp_path, monkeypatch, capsys):
    write_sst2(tmp_path, 2_400)
    monkeypatch.setattr(sst2, "HELD_OUT", 60)
    monkeypatch.setattr(sst2, "ITERATIONS", 5)
    monkeypatch.setattr(sst2, "CONFIG", dataclasses.replace(sst2.CONFIG, num_episodes=64))
    monkeypatch.setattr("sys.argv", ["sst2_sentiment.py", "--data", str(tmp_path), "--seeds", "1", "--json"])
    sst2.main()
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    (run,) = result["runs"]
    assert min(result["dev_accuracy"].values()) > 0.7
    assert run["after"]["score"] > run["before"]["score"] + 0.14
    assert abs(run["before"]["kl"]) < 1e-4 < run["after"]["kl"]
    samples = [line for line in output.splitlines() if line[:2] in ("- ", "+ ")]
    assert len(samples) == 20 and not [line for line in samples if "<eos" in line]


# --- the whole pipeline: examples/rlhf.py ----------------------------------------------------------------------------


@pytest.fixture
def example():
    return load_example("rlhf")


def test_beginnings_take_three_to_five_words(example):
    """In turn, and no word is lost."""
    rows = [("a b c d e f g", 1), ("too short a text here", 0), ("h i j k l m", 0), ("n o p q r s", 1)]
    rows.append((" ".join("x" * (example.MOST_WORDS + 1)), 1))
    assert example.beginnings(rows) == [
        {"prompt": "a b c", "completion": " d e f g"},
        {"prompt": "h i j k l", "completion": " m"},
        {"prompt": "n o p", "completion": " q r s"},
    ]


def test_preference_pairs_share_their_first_word(example):
    """The liked one is chosen, and none is left out."""
    rows = [("the good", 1), ("the fine", 1), ("the bad", 0), ("it won", 1), ("it lost", 0), ("it sank", 0), ("so", 1)]
    assert example.preferences(rows) == [
        {"prompt": "it", "chosen": " won", "rejected": " lost"},
        {"prompt": "it", "chosen": " won", "rejected": " sank"},
        {"prompt": "the", "chosen": " good", "rejected": " bad"},
        {"prompt": "the", "chosen": " fine", "rejected": " bad"},
    ]


def test_the_judge_is_naive_bayes(example):
    judge = example.WordCounts([("good film", 1), ("bad film", 0)])
    # Three words, each counted once more: p(good | liked) = 2/5, p(good | disliked) = 1/5.
    said = judge.scores(["good", "good good film", "bad", "film", "unheard"])
    torch.testing.assert_close(said, torch.tensor([2 / 3, 4 / 5, 1 / 3, 1 / 2, 1 / 2]))
    assert judge.accuracy([("good", 1), ("bad film", 1), ("bad", 0), ("good", 0)]) == 0.5


@pytest.fixture
def small(example, monkeypatch):
    """All stages in seconds."""
    monkeypatch.setattr(example, "LANGUAGE", dataclasses.replace(example.LANGUAGE, num_epochs=3))
    return example


def in_seconds(settings):
    return dataclasses.replace(
        settings,
        fine_tuning=dataclasses.replace(settings.fine_tuning, num_epochs=3),
        reward=dataclasses.replace(settings.reward, num_epochs=3),
        ppo=dataclasses.replace(settings.ppo, num_episodes=32),
        total_steps=1_500,
        new_tokens=12,
    )


@pytest.mark.long
def test_all_stages_teach_with_either_critic(small, capsys):
    """Both critics give the same kind of result."""
    rows, dev = reviews(360, seed=1), [(f"now {text}", label) for text, label in reviews(40, seed=2)]
    settings = in_seconds(small.SCRATCH)
    runs = {critic: small.run(rows, dev, critic, 1, settings=settings) for critic in ("head", "model")}
    (made, head), (made_again, model) = runs["head"], runs["model"]
    assert made == made_again, "what comes before PPO does not know the critic"
    assert list(head) == list(model) == ["LM", "SFT", "PPO seed 1"]
    for columns in (head, model):
        assert len({tuple(figures) for figures, _ in columns.values()}) == 1
        assert all(math.isfinite(figure) for figures, _ in columns.values() for figure in figures.values())
        assert all(" |" in text for _, texts in columns.values() for text in texts)
        (plain, _), (tuned, _), (trained, _) = columns.values()
        assert plain["ended by itself"] < 0.3 and min(tuned["ended by itself"], trained["ended by itself"]) > 0.6
        assert trained["reward model's score"] > tuned["reward model's score"] + 0.5
        assert trained["judge: positive"] > tuned["judge: positive"] + 0.08
    assert head["LM"] == model["LM"] and head["SFT"] == model["SFT"]
    assert head["PPO seed 1"] != model["PPO seed 1"], "the two critics are not one"
    kl = {name: figures["KL to SFT, nats"] for name, (figures, _) in model.items()}
    assert kl["SFT"] == pytest.approx(0, abs=1e-4) and kl["LM"] > 0.01 and abs(kl["PPO seed 1"]) > 1e-3
    small.report(model)
    assert capsys.readouterr().out.count("PPO seed 1:") == 8


def test_the_reward_model_begins_as_the_sft_model(example):
    rows = reviews(60, seed=3)
    tokenizer = example.make_tokenizer([text for text, _ in rows])
    torch.manual_seed(5)
    lm, _ = small_language_model(example, rows, tokenizer)
    ids = torch.tensor([tokenizer("the new film is very fine")["input_ids"]])
    hidden = example.make_reward_model(lm).model.transformer(input_ids=ids).last_hidden_state
    torch.testing.assert_close(hidden, lm.hidden(ids))


def small_language_model(example, rows, tokenizer):
    example.LANGUAGE = dataclasses.replace(example.LANGUAGE, num_epochs=1)
    return example.train_language_model(rows, tokenizer, rows)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["head", "model"])
def test_ppo_raises_the_score_and_the_judge_agrees(example, critic):
    """The README's claim, one seed; answers stay varied and go on ending by themselves."""
    if not (DATA / "sst2").is_dir():
        pytest.skip(f"there is no {DATA / 'sst2'}: the data of shared/data is not here")
    _, columns = example.run(*(example.read(DATA / "sst2" / name) for name in ("train.tsv", "dev.tsv")), critic, 1)
    (lm, _), (before, _), (after, _) = columns.values()
    assert lm["ended by itself"] < 0.1 and before["ended by itself"] > 0.75
    assert after["reward model's score"] > before["reward model's score"] + 1.5
    assert after["judge: positive"] > before["judge: positive"] + 0.1
    assert after["ended by itself"] > 0.9 and after["distinct-2"] > 0.65


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_harness_of_verifiers_teaches():
    """The order of the episodes is chance, so no seed fixes this run: six of six rose from .15 to .8 or more."""
    pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")
    history = load_example("train_harness").main(total_steps=5_000, log=None)
    assert history[0]["programs/questions"] == 2 and history[0]["programs/failed"] == 0
    assert max(metrics["episode/return"] for metrics in history) > history[0]["episode/return"] + 0.3
    gc.collect()  # verifiers leaves connections open; their warnings belong to this test, and not to a later one


@pytest.mark.heavy
def test_self_play_finds_the_way_to_an_equilibrium(capsys):
    """In miniature; the average policy of the first iterations is that of random weights."""
    example = load_example("self_play")
    options = SimpleNamespace(seed=1, games=64, iterations=40, rate=5e-3, entropy=0.1, epochs=2, every=5, league=0)
    example.play_kuhn(options)
    averages = [float(number) for number in re.findall(r"average (\d\.\d+)", capsys.readouterr().out)]
    assert len(averages) > 4 and averages[-1] < averages[0]

    options = SimpleNamespace(seed=1, games=8, iterations=4, rate=1e-3, entropy=0.1, epochs=1, every=2, league=2)
    example.play_tic_tac_toe(options)
    assert re.search(r"500 games against the perfect player, sampled moves: [01]\.\d+ drawn", capsys.readouterr().out)
