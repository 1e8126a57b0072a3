"""Human feedback: what is asked, what it scores, and how a person goes back or quits."""

import os

import pytest

from algos.cli import main
from tests.helpers.errors import refused
from tests.helpers.feedback import Scripted, better, call, lines
from textenv import HumanReward
from textenv.extras.human import FeedbackFile, FeedbackStopped
from textenv.extras.human.feedback_file import krippendorff_alpha


def test_thumbs_are_one_and_zero_and_a_skip_is_none(path):
    human = HumanReward(path, annotator=Scripted(["up", "down", "skip"]))
    assert call(human, ["a", "b", "c"]) == [1.0, 0.0, None]


def test_marks_are_mapped_to_zero_to_one(path):
    assert call(HumanReward(path, scale="0-5", annotator=Scripted(["0", "4", "5"])), ["a", "b", "c"]) == [0.0, 0.8, 1.0]


def test_neighbours_of_a_prompt_are_compared(path):
    """One that is left over gets no score."""
    annotator = Scripted(better)
    human = HumanReward(path, scale="pairs", annotator=annotator)
    scores = human(prompts=["p", "q", "p", "q", "p", "p", "p"], completions=["a", "x", "b", "=", "d", "c", "e"])
    assert scores == [0.0, 0.5, 1.0, 0.5, 1.0, 0.0, None]
    assert {question.prompt: set(question.responses) for question in annotator.questions[2:]} == {"q": {"x", "="}}
    assert [set(shown) for shown in annotator.shown[:2]] == [{"a", "b"}, {"d", "c"}]


def test_the_order_of_a_pair_is_drawn_by_the_seed(tmp_path):
    def firsts(seed):
        annotator = Scripted(better)
        human = HumanReward(
            tmp_path / f"{seed}-{os.urandom(4).hex()}.jsonl", scale="pairs", annotator=annotator, seed=seed
        )
        scores = human(prompts=[i // 2 for i in range(40)], completions=["a", "b"] * 20)
        assert scores == [0.0, 1.0] * 20
        return [first for first, _ in annotator.shown]

    assert 4 < firsts(0).count("a") < 16
    assert firsts(0) == firsts(0) != firsts(1)


def test_equal_questions_are_asked_once(path):
    """Equal pairs in either order."""
    annotator = Scripted(["up", "down"])
    assert call(HumanReward(path, annotator=annotator), ["a", "b", "a"]) == [1.0, 0.0, 1.0]
    annotator = Scripted(better)
    human = HumanReward(path, scale="pairs", annotator=annotator)
    assert call(human, ["a", "b", "a"]) == [0.0, 1.0, 0.0]
    assert call(human, ["b", "a"]) == [1.0, 0.0]
    assert len(annotator.questions) == 1


def test_chats_are_asked_kept_and_found_as_messages(path):
    chat, said = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "ho"}]
    human = HumanReward(path, annotator=Scripted(["up"]))
    assert human(prompts=[chat], completions=[said]) == human(prompts=[chat], completions=[said]) == [1.0]
    assert human.file.scored() == [{"prompt": chat, "completion": said, "score": 1.0}]


def length(prompts, completions, weight, trainer_state=None, **columns):
    assert len(prompts) == len(completions) == len(weight)
    return [len(text) * w for text, w in zip(completions, weight, strict=True)]


def test_a_fallback_scores_what_nobody_did(path):
    """It gets the columns of those rows."""
    human = HumanReward(path, annotator=Scripted(["up", "skip", "down"]), fallback=length)
    assert call(human, ["a", "bb", "c"], weight=[7, 10, 7], trainer_state=None) == [1.0, 20, 0.0]


def test_at_most_a_share_is_asked(tmp_path):
    said = [str(i) for i in range(30)]

    def asked(name, *, share=0.1, seed=0, batch=said):
        annotator = Scripted(lambda question: "up")
        human = HumanReward(tmp_path / f"{name}.jsonl", annotator=annotator, fallback=length, fraction=share, seed=seed)
        call(human, batch, weight=[1] * len(batch))
        return [shown[0] for shown in annotator.shown]

    assert len(asked("a")) == 3
    assert asked("b") == asked("c")  # the same ones again
    assert asked("a") == []  # so that a restart asks only what is missing of them
    assert asked("d") != asked("e", seed=1)
    assert asked("f") != asked("g", batch=[*said[:-1], "x"])
    assert asked("h", share=0) == [] and len(asked("i", share=0.01)) == 1 and len(asked("j", share=1)) == 30


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"scale": "stars"}, ValueError, "thumbs, 0-5, pairs"),
        ({"fraction": 1.5}, ValueError, "from 0"),
        ({"fraction": 0.5}, ValueError, "fallback=reward_model"),
        ({"fallback": 3}, TypeError, "fallback is 3"),
        ({"annotator": object()}, TypeError, "textenv.extras.human.Annotator"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(path, options, error, says):
    with pytest.raises(error, match=says):
        HumanReward(path, **options)


def test_wrong_answers_and_counts_are_named(path):
    with pytest.raises(ValueError, match=r"'script' answered 'undo', expected one of up, down, skip, quit"):
        call(HumanReward(path, annotator=Scripted(["undo"])), ["a"])
    with pytest.raises(ValueError, match="'fallback' returned 1 values for 2"):
        call(HumanReward(path, annotator=Scripted(["skip"] * 2), fallback=lambda **_: [1.0]), ["a", "b"])


def test_undo_asks_the_last_question_again(path):
    annotator = Scripted(["up", "up", "undo", "undo", "down", "down", "up"])
    assert call(HumanReward(path, annotator=annotator), ["a", "b", "c"]) == [0.0, 0.0, 1.0]
    assert [(q.responses[0], q.number, q.total, q.can_undo) for q in annotator.questions] == [
        ("a", 1, 3, False), ("b", 2, 3, True), ("c", 3, 3, True), ("b", 2, 3, True), ("a", 1, 3, False),
        ("b", 2, 3, True), ("c", 3, 3, True),
    ]  # fmt: skip
    assert [line["answer"] for line in lines(path)] == ["down", "down", "up"]


def test_who_quits_goes_on_where_he_stopped(path):
    with pytest.raises(
        FeedbackStopped, match=rf"after 2 of 4 .*\(2 with .* saved in {path}: run the same program again"
    ):
        call(HumanReward(path, annotator=Scripted(["up", "skip", "quit"])), ["a", "b", "c", "d"])
    annotator = Scripted(["down", "up"])
    assert call(HumanReward(path, annotator=annotator), ["a", "b", "c", "d"]) == [1.0, None, 0.0, 1.0]
    assert annotator.shown == [("c",), ("d",)]


def test_who_quits_in_training_is_not_asked_again(tmp_path):
    from algos import PPO, LMPolicy, PPOConfig
    from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
    from textenv import TextVectorEnv

    class Quits:
        name, asked = "tester", 0

        def ask(self, question):
            self.asked += 1
            return "quit"

    annotator, tokenizer = Quits(), make_tokenizer(WORDS)
    human = HumanReward(tmp_path / "t.jsonl", annotator=annotator)
    env = TextVectorEnv(prompts=["a"], reward=human, tokenizer=tokenizer, num_envs=4, max_new_tokens=4)
    agent = PPO(env, LMPolicy(make_gpt2(), tokenizer), PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8))
    with pytest.raises(FeedbackStopped, match="run the same program again"):
        agent.learn(100)
    assert annotator.asked == 1


def test_the_command_tells_who_quits_how_to_go_on(tmp_path, monkeypatch, capsys, caplog):
    """In sentences; and nothing of the file's lock is told to be lost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "this film"}\n{"prompt": "the movie"}\n')
    (tmp_path / "opinions.py").write_text(
        "from textenv import HumanReward\n\n\nclass Reader:\n    name = 'reader'\n\n    def ask(self, question):\n"
        "        return 'up' if question.number < 3 else 'quit'\n\n\n"
        "human = HumanReward('answers.jsonl', annotator=Reader())\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["train", "--prompts", "prompts.jsonl", "--reward", "opinions.py:human", "--total-steps", "200",
              "--max-new-tokens", "4", "--quiet", "--run-dir", "run"])  # fmt: skip
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "Traceback" not in said and "fixing" not in said
    assert "the person quit" in said and f"to go on, resume the run: --resume {tmp_path / 'run'}" in said
    assert "which no checkpoint has" not in caplog.text


class Named:
    """Answers from a list, under a name."""

    def __init__(self, name, answers):
        self.name, self.left = name, list(answers)

    def ask(self, question):
        return self.left.pop(0)

    def cancel(self):
        pass


def test_the_score_is_the_mean_over_people(tmp_path):
    path = tmp_path / "thumbs.jsonl"
    people = [Named("ann", ["up", "down", "up"]), Named("bob", ["up", "up", "skip"])]
    human = HumanReward(path, annotator=people)
    assert call(human, ["a", "b", "c"]) == [1.0, 0.5, 1.0] == call(human, ["a", "b", "c"])
    assert sorted((x["annotator"], x["completion"], x["answer"]) for x in lines(path)) == [
        ("ann", "a", "up"), ("ann", "b", "down"), ("ann", "c", "up"),
        ("bob", "a", "up"), ("bob", "b", "up"), ("bob", "c", "skip"),
    ]  # fmt: skip
    file = FeedbackFile(path)
    assert len(file.scored()) == 5 and file.agreement() == {"thumbs": krippendorff_alpha([[1, 1], [0, 1]])}
    from textenv.rewards.training import RewardLog, training

    with training(0, 0.0, log := RewardLog(3)):
        call(human, ["a", "b", "c"])
    assert log.columns() == {"agreement": [file.agreement()["thumbs"]] * 3}
    one = HumanReward(path, annotator=Named("eve", []))
    assert call(one, ["a", "b", "c"]) == [1.0, 0.5, 1.0], "one person alone is asked only what nobody has answered"


@pytest.mark.parametrize(
    ("people", "error", "says"),
    [
        ([Named("a", []), Named("a", [])], ValueError, "give each its own name"),
        ([], TypeError, "or a list of them"),
        ([Named("a", []), 3], TypeError, "or a list of them"),
        ([Named("a", []), type("Bare", (), {"name": "b", "ask": print})()], TypeError, "only several BrowserAnnotator"),
    ],
)
def test_people_who_cannot_be_asked_are_refused(tmp_path, people, error, says):
    with refused(error, says):
        HumanReward(tmp_path / "x.jsonl", annotator=people)
