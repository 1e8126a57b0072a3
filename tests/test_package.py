"""What is published: a source archive, the wheel that is built from it, and that wheel without the sources."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARCHIVE = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
PROGRAM = """
import algos, algos.cli, textenv, gymnasium, sys
assert all(module.__file__.startswith(sys.argv[1]) for module in (algos, textenv)), algos.__file__
agent = algos.PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=8, minibatch_size=16)
agent.learn(32)
policy = algos.LMPolicy.load("embedded")
env = textenv.TextVectorEnv(prompts=["this film"], reward=lambda completions, **_: [1.0] * len(completions),
                            tokenizer=policy.tokenizer, num_envs=2, max_new_tokens=4)
agent = algos.PPO(env, policy, algos.presets.TEXT, num_episodes=4, kl_coef=0.1)
agent.learn(8, run_dir=sys.argv[2])
algos.cli.main(["report", sys.argv[2], "--json"])
print(agent.learn(8)[-1]["episode/return"])
"""


def run(*command, **options):
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.strip()


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(r"^## (\d+\.\d+\.\d+(?:rc\d+)?)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_wheel_works_without_the_sources(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    sources, site = tmp_path / "sources", tmp_path / "site"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "runs", "site", "__pycache__")
    shutil.copytree(ROOT, sources, ignore=left_out)
    isolated = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(*pip, "install", "--target", tmp_path / "backend", "setuptools>=77", env=isolated)
    built = run(
        sys.executable, "-c", ARCHIVE, tmp_path, cwd=sources, env=isolated | {"PYTHONPATH": str(tmp_path / "backend")}
    )
    with tarfile.open(tmp_path / built.splitlines()[-1]) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / "tests").exists()  # without their helpers they could not run
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, unpacked, env=isolated)
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", site, wheel, env=isolated)
    there = isolated | {"PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore"}
    assert float(run(sys.executable, "-c", PROGRAM, site, tmp_path / "run", cwd=tmp_path, env=there).split()[-1]) == 1.0
    assert run(sys.executable, "-m", "algos", "--version", cwd=tmp_path, env=there).startswith("textenv ")
    assert {path.name for path in site.iterdir()} >= {"algos", "textenv"} and not (site / "tests").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_dockerfile_run_in_an_empty_environment(tmp_path):
    """Where no image can be built: each RUN, in a copy of the sources, with this interpreter. `make dist` runs it."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    commands = re.findall(r"^RUN (.*)$", dockerfile, re.MULTILINE)
    assert len(commands) == 3
    sources = tmp_path / "source"
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(".*", "runs", "site", "dist", "__pycache__"))
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    (default_torch,) = re.findall(r'^ARG TORCH="(.*)"$', dockerfile, re.MULTILINE)
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    there |= {"PATH": f"{tmp_path / 'empty' / 'bin'}:{os.environ['PATH']}", "TORCH": default_torch}
    there["PIP_NO_COMPILE"] = "false"  # it means that pip compiles nothing, which takes longer than it gains
    for command in commands:
        run("bash", "-c", command, cwd=sources, env=there)
    (tmp_path / "work").mkdir()
    options = ["train", "CartPole-v1", "--total-steps", "2000", "--quiet", "--run-dir", "runs/first"]
    run("bash", "-c", 'algos "$@"', "algos", *options, cwd=tmp_path / "work", env=there)
    assert (tmp_path / "work" / "runs" / "first" / "metrics.jsonl").exists()
