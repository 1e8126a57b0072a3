"""The command ``algos serve``; `tests/algos/extras/test_serving.py` tests its server."""

import subprocess
import sys

import pytest

from algos.cli import main
from tests.helpers.packages import lazy_import
from tests.helpers.resumable_agents import ppo_cartpole

openai = lazy_import("openai", reason="the client of OpenAI, which comes with verifiers")


@pytest.mark.heavy
def test_the_command_prints_its_address_and_key():
    words = [sys.executable, "-m", "algos", "serve", "embedded", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        model, url, key = (process.stdout.readline().rstrip("\n") for _ in range(3))
        try:
            client = openai.OpenAI(base_url=url.partition("=")[2], api_key=key.partition("=")[2], max_retries=0)
            assert client.models.list().data[0].id == model.removeprefix("model: ") == "embedded"
        finally:
            process.terminate()


def test_only_a_language_model_is_served(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["serve", str(ppo_cartpole().save(tmp_path / "run"))])
    assert "only a language model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "missing"])
    assert "there is no folder missing" in capsys.readouterr().err
