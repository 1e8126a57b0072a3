"""A program that asks a gateway, with Python's own library only; as a script it plays one episode."""

import json
import os
import sys
import time
import urllib.request


class Player:
    """Client of one session."""

    def __init__(self, session, key):
        self.session = session
        self.key = key

    def send(self, path, body=None):
        """Answer to a GET, or with a body to a POST."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.session + path, content, headers), timeout=60) as reply:
            return json.load(reply)

    def task(self):
        task = self.send("")["task"]
        return task["text"] if isinstance(task, dict) else task

    def complete(self, prompt, **options):
        return self.send("/v1/completions", {"model": "any", "prompt": prompt, **options})["choices"][0]["text"]

    def chat(self, messages, **options):
        body = {"model": "any", "messages": messages, **options}
        return self.send("/v1/chat/completions", body)["choices"][0]["message"]

    def reward(self, value):
        return self.send("/reward", {"reward": value})


def dialogue(player):
    """Ask twice; the reward is the number of words that were answered."""
    text = player.task()
    total = 0
    for _ in range(2):
        answer = player.complete(text)
        total += len(answer.split())
        text += answer + " a"
    player.reward({"words": total, "bonus": 0.5})


def main():
    player = Player(os.environ["TEXTENV_SESSION"], os.environ["OPENAI_API_KEY"])
    task = player.task()
    player.complete("a")
    if "crash" in task:
        print("the last words")
        sys.exit(3)
    if "leave out" in task:
        player.reward(None)
    elif "stay" in task:
        player.reward(1)
        time.sleep(60)
    elif "hang" in task:
        time.sleep(60)
    elif "silent" not in task:
        dialogue(player)


if __name__ == "__main__":
    main()
