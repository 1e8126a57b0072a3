"""The shape of the code: one import direction, light control runs, small files."""

import ast
import graphlib
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("textenv/**/*.py"), *ROOT.glob("algos/**/*.py")])


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


LAYERS = {
    "textenv": """
        registration
        tasks checks
        extras
        envs
        rewards kl
        lm
        prompts embedded games
        rollout errors rendering progress acceleration device names foreign plain json_files loopback optional cache
        importing processes state
    """,
    "algos": """
        cli
        lab
        presets recipe make evaluation
        extras
        ppo a2c reinforce rloo grpo trpo dqn
        agent
        minibatches
        optimizer advantages finetuning
        training
        collection
        policies
        storage
        fast losses ranks config envs
    """,
}
"""From the top: a room imports from its own line and those below."""


def imported_modules(path):
    """Our modules that a file imports anywhere, under TYPE_CHECKING and inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from {inner if inner in MODULES else node.module} & MODULES.keys()


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_textenv_never_imports_algos():
    for path in FILES:
        if path.is_relative_to(ROOT / "textenv"):
            assert not [name for name in imported_names(path) if name.split(".")[0] == "algos"], path


def test_no_files_import_each_other_in_a_circle():
    order = graphlib.TopologicalSorter({name: set(imported_modules(path)) - {name} for name, path in MODULES.items()})
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def rooms_of(package):
    """For each room of a package the rooms that it imports; a room is a folder or file at the top."""
    rooms = {}
    for name, path in MODULES.items():
        top, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        if top != package or room in ("", "__main__"):
            continue
        imported = [other for other in imported_modules(path) if other.startswith(f"{package}.")]
        rooms.setdefault(room, set()).update(other.split(".")[1] for other in imported)
    return {room: imported - {room} for room, imported in rooms.items()}


@pytest.mark.parametrize("package", LAYERS)
def test_rooms_import_only_from_below(package):
    levels = {room: level for level, line in enumerate(LAYERS[package].split("\n")) for room in line.split()}
    for room, imported in rooms_of(package).items():
        assert not [other for other in imported if levels[other] < levels[room]], room


@pytest.mark.parametrize("package", LAYERS)
def test_no_rooms_import_each_other_in_a_circle(package):
    try:
        graphlib.TopologicalSorter(rooms_of(package)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_core_imports_neither_lab_nor_extras():
    for room, imported in rooms_of("algos").items():
        assert "lab" not in imported or room == "cli", room
        assert "extras" not in imported or room in ("cli", "lab"), room
    for room, imported in rooms_of("textenv").items():
        assert "extras" not in imported or room in ("tasks", "checks"), room


def test_a_folder_has_three_to_twenty_files():
    folders = Counter(path.parent for path in FILES)
    assert max(folders.values()) <= 20
    assert {folder.name for folder, count in folders.items() if count < 3} <= {"human"}


UNFOLDED = """
    algos/a2c.py algos/advantages.py algos/agent.py algos/dqn.py algos/grpo.py algos/losses.py algos/minibatches.py
    algos/optimizer.py algos/ppo.py algos/reinforce.py algos/rloo.py algos/trpo.py algos/fast/closed_form.py
    algos/training/learner.py algos/training/metrics.py algos/lab/comparison/figures.py algos/lab/comparison/compare.py
    algos/lab/comparison/record.py algos/finetuning/reward_data.py textenv/acceleration.py textenv/plain.py
    textenv/state.py textenv/lm/answers.py textenv/prompts/messages.py algos/envs/spaces.py algos/envs/batching.py
    algos/envs/flatten.py algos/training/signals.py algos/training/unsaved.py algos/cli/user_code.py
    textenv/importing.py textenv/processes.py
    textenv/rewards/composite.py
    textenv/rewards/scores.py
    textenv/rewards/calling.py
    textenv/rewards/reward_model.py
    textenv/rewards/transforms.py
    textenv/rewards/training.py
    textenv/rewards/metrics.py
    textenv/rewards/workers.py
    textenv/rewards/packages.py
    textenv/rewards/patterns.py
    textenv/rewards/numeric.py
    textenv/rewards/answer.py
    textenv/rewards/references.py
    textenv/rewards/lengths.py
    textenv/checks/env_checker.py
    textenv/checks/env_driver.py
    textenv/checks/reward_checker.py
    textenv/checks/reward_probes.py
    textenv/kl/coefficients.py
    textenv/kl/estimators.py
    textenv/kl/penalty.py
    textenv/prompts/prompts.py
    textenv/prompts/tokenize.py
    textenv/prompts/files.py
    textenv/prompts/special_tokens.py
    textenv/prompts/plain_text.py
    textenv/prompts/lengths.py
    textenv/rendering.py
    textenv/loopback.py
    textenv/names.py
    textenv/json_files.py
    textenv/errors.py
    textenv/device.py
    textenv/progress.py
    textenv/registration.py
    textenv/optional.py
    textenv/tasks/builtin.py
    textenv/tasks/own_prompts.py
    textenv/games/calculator.py
    textenv/games/dialogue.py
    textenv/games/guess_number.py
    textenv/games/twenty_questions.py
    textenv/cache.py
    textenv/embedded/folder.py
    textenv/embedded/gguf.py
    textenv/embedded/grammar.py
    textenv/embedded/training.py
    textenv/foreign.py
    textenv/__init__.py
    textenv/envs/vector_env.py
    textenv/envs/transcript.py
    textenv/rollout.py
    textenv/envs/turn.py
    textenv/envs/limits.py
    textenv/envs/action_masks.py
    textenv/envs/episode_batch.py
    textenv/envs/early_scores.py
    textenv/envs/task.py
    textenv/envs/string_env.py
    textenv/envs/tools.py
    textenv/envs/kl_wrappers.py
    textenv/envs/text_env.py
    algos/policies/policy.py
    algos/policies/distributions.py
    algos/policies/gsde.py
    algos/policies/lstm.py
    algos/policies/lm.py
    algos/policies/critic.py
    algos/policies/fitted_value.py
    algos/policies/mlp.py
    algos/policies/towers.py
    algos/policies/cnn.py
    algos/policies/q_network.py
    algos/policies/layers.py
    algos/policies/normalizers.py
    algos/policies/random_streams.py
    algos/policies/registry.py
    algos/fast/towers.py
    algos/fast/sampling.py
    algos/fast/adam.py
    algos/collection.py
    algos/config.py
    algos/evaluation.py
    algos/make.py
    algos/presets.py
    algos/recipe.py
    algos/storage/run_files.py
    algos/policies/generator.py
    algos/envs/subprocess_env.py
    algos/envs/env_worker.py
    algos/envs/wrapping.py
    algos/finetuning/sft.py
    algos/finetuning/packing.py
    algos/finetuning/reward_model.py
    algos/finetuning/optimizer.py
    algos/finetuning/text_loss.py
    algos/training/loop.py
    algos/training/run.py
    algos/training/loggers.py
    algos/training/save.py
    algos/training/invariants.py
    algos/training/diagnose.py
    algos/training/callbacks.py
    algos/training/live_view.py
    algos/training/reward_hacking.py
    algos/storage/run_folder.py
    algos/storage/run_reader.py
    algos/storage/checkpoint.py
    algos/storage/serialization.py
    algos/storage/env_state.py
    algos/storage/saved_environment.py
    algos/storage/hub.py
    algos/storage/provenance.py
    algos/storage/weights.py
    algos/ranks/collectives.py
    algos/ranks/sharding.py
    textenv/lm/decoding.py
    textenv/lm/caches.py
    textenv/lm/model.py
    textenv/lm/loading.py
    textenv/lm/seq2seq.py
    textenv/lm/sampling.py
    textenv/lm/scoring.py
    textenv/lm/recording.py
    textenv/lm/padding.py
    textenv/lm/memory.py
    textenv/lm/ends.py
    textenv/lm/origin.py
    textenv/lm/choices.py
    textenv/lm/adapter_config.py
    textenv/extras/bounded_http.py
    algos/extras/ray_workers.py
    algos/extras/vllm.py
    textenv/extras/human/feedback_file.py
    textenv/extras/human/terminal.py
    textenv/extras/human/browser.py
    textenv/extras/human/annotator.py
    textenv/extras/human/human.py
    textenv/extras/safe_eval.py
    textenv/extras/guidance.py
    textenv/extras/reasoning_gym.py
    textenv/extras/openenv.py
    textenv/extras/textworld.py
    textenv/extras/verifiers.py
    textenv/extras/service.py
    textenv/extras/torchrl.py
    algos/cli/train.py
    algos/cli/arguments.py
    algos/cli/serve.py
    algos/cli/__init__.py
    algos/cli/evaluate.py
    algos/cli/interpret.py
    algos/cli/sample.py
    algos/cli/show.py
    algos/cli/plan.py
    algos/cli/check.py
    algos/cli/compare.py
    algos/cli/report.py
    algos/cli/tune.py
    algos/cli/film.py
    algos/cli/tables.py
    algos/cli/request_fields.py
    algos/lab/comparison/page.py
    algos/lab/comparison/runs.py
    algos/lab/comparison/words.py
    algos/lab/comparison/summary.py
    algos/lab/comparison/report.py
    algos/lab/comparison/paper.py
    algos/lab/comparison/tune.py
    algos/lab/memory_plan.py
    algos/lab/model_card.py
    algos/lab/run_summary.py
    algos/lab/insight/activations.py
    algos/lab/insight/attribution.py
    algos/lab/insight/blocks.py
    algos/lab/insight/control.py
    algos/lab/insight/dynamics.py
    algos/lab/insight/finding.py
    algos/lab/insight/language.py
    algos/lab/insight/tokens.py
"""
"""Files to be read once: one idea a line. New files belong here; the others are unfolded one by one."""
VAGUE = {"found", "said", "own", "given", "place", "whole", "known", "each"}
"""No names of locals, except in comprehensions."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def folded(path):
    """Lines of a file that hold more than one idea, and long functions whose phases have no name."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip()[0] == "#"}
    tree = ast.parse(text)
    inside = [x for x in ast.walk(tree) if isinstance(x, COMPREHENSIONS)]
    targets = {id(x) for comprehension in inside for part in comprehension.generators for x in ast.walk(part.target)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in targets:
            if node.id in VAGUE:
                yield node.lineno, f"a local named {node.id}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if isinstance(node.value, ast.Tuple):
                yield node.lineno, "several assignments"
        elif isinstance(node, ast.Call):
            if any(isinstance(x, ast.IfExp) for x in [*node.args, *(keyword.value for keyword in node.keywords)]):
                yield node.lineno, "a conditional expression inside a call"
        elif isinstance(node, ast.FunctionDef):
            body = node.body[bool(ast.get_docstring(node)) :]
            lines = range(body[0].lineno, node.end_lineno) if body else range(0)
            if len(lines) >= 20 and not comments & {*lines}:
                yield node.lineno, f"{node.name} is long and has no comment"


@pytest.mark.parametrize("path", UNFOLDED.split())
def test_an_unfolded_file_has_one_idea_a_line(path):
    assert list(folded(ROOT / path)) == []


MIRRORED = ("textenv", "algos")
"""Packages whose tests stand as its modules do: `tests/X/test_m.py` or `test_m_<aspect>.py` tests `X/m.py`."""


@pytest.mark.parametrize("package", MIRRORED)
def test_a_test_file_is_named_after_a_module(package):
    for path in ROOT.glob(f"tests/{package}/**/test_*.py"):
        modules = [module.stem for module in (ROOT / path.parent.relative_to(ROOT / "tests")).glob("*.py")]
        assert any(path.stem == f"test_{name}" or path.stem.startswith(f"test_{name}_") for name in modules), path


def test_tests_share_helpers_not_each_other():
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]:
        assert not re.findall(r"(?:from|import) tests\.[\w.]*\btest_\w*", path.read_text()), path


def test_every_row_of_the_pitfalls_names_its_tests():
    page = (ROOT / "docs" / "pitfalls.md").read_text()
    table, _, lists = page.partition("## The tests")
    rows = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    sections = dict(re.findall(r"^### (\d+)\n((?:\n?- .*\n?)*)", lists, re.MULTILINE))
    assert rows == list(sections) == [str(i + 1) for i in range(len(rows))]
    for row, section in sections.items():
        named = re.findall(r"^- `(tests/\S+\.py)::(test_\w+)`$", section, re.MULTILINE)
        assert named and len(named) == section.count("- "), f"row {row}"
        for path, name in named:
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"row {row}: {path}::{name}"


def test_there_is_not_a_word_about_text_in_ppo():
    words = (ROOT / "algos" / "ppo.py").read_text()
    names = {node.id for node in ast.walk(ast.parse(words)) if isinstance(node, ast.Name)}
    assert not names & {"isinstance", "tokenizer", "LMPolicy", "TextVectorEnv", "hasattr"}
    assert not [name for name in imported_names(ROOT / "algos" / "ppo.py") if ".lm" in name or "vector_env" in name]


def test_a_control_run_imports_nothing_heavy():
    program = """
import sys, gymnasium
from algos import PPO, MLPPolicy, PPOConfig
env = gymnasium.make_vec("CartPole-v1", num_envs=2)
policy = MLPPolicy(env.single_observation_space, env.single_action_space)
PPO(env, policy, PPOConfig(num_steps=8, minibatch_size=8)).learn(16)
heavy = [m for m in ("transformers", "torchrl", "matplotlib", "tensorboard", "tokenizers") if m in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_importing_textenv_loads_nothing_heavy():
    program = "import gymnasium, textenv, sys; gymnasium.spec('textenv/Reviews-v0'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_packages_are_those_of_the_checkout():
    import algos
    import textenv

    assert Path(algos.__file__).parent == ROOT / "algos" and Path(textenv.__file__).parent == ROOT / "textenv"


PATCHES = {
    "tests/algos/fast/test_closed_form.py": "that an edit or a patch of a function takes effect is what it tests",
    "tests/helpers/chunks.py": "real chunks of logits hold 8 million numbers",
    "tests/helpers/ranks.py": "real chunks of gradients hold millions of numbers too",
}
"""Files that may patch our modules and use their private names, and why."""


def lines_behind_the_public_names(tree):
    """Lines of a test that patch something of ours or use a private name of ours."""
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = {alias.asname or alias.name.split(".")[0] for alias in node.names if not module}
            if module and module.split(".")[0] in LAYERS:
                names = {alias.asname or alias.name for alias in node.names}
                yield from (node.lineno for alias in node.names if alias.name.startswith("_"))
                ours |= names
            ours |= names & LAYERS.keys()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = ast.unparse(node.args[0]).strip("'\"*").split(".")[0].split("(")[0]
            if node.func.attr in ("setattr", "delattr", "setitem") and first in ours | LAYERS.keys():
                yield node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            uses_private = isinstance(node.ctx, ast.Store) or re.match("_[^_]", node.attr)
            if node.value.id in ours and uses_private:
                yield node.lineno


def test_tests_reach_our_code_by_its_public_names():
    for path in ROOT.glob("tests/**/*.py"):
        name = str(path.relative_to(ROOT))
        if name not in PATCHES:
            assert list(lines_behind_the_public_names(ast.parse(path.read_text()))) == [], name
