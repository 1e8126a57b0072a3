"""What reward functions give for answers."""

from textenv.rewards.calling import call_reward


def rate(function, *answers, chat=False, prompt="?", **columns):
    """Its scores for these answers to a question, as texts or as chats, with further columns."""
    n = len(answers)
    said = [[{"role": "assistant", "content": text}] if chat else text for text in answers]
    asked = [[{"role": "user", "content": "?"}]] * n if chat else [prompt] * n
    if "completion_ids" not in columns:
        columns["completion_ids"] = [list(text.encode(errors="replace")) for text in answers]
    return call_reward(function, {"prompts": asked, "completions": said, "terminated": [True] * n} | columns)
