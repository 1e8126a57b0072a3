"""Settings of the documentation site, which `make docs` builds into ``site/``: https://www.sphinx-doc.org."""

import re
from dataclasses import fields, is_dataclass
from importlib.metadata import version as installed
from typing import Annotated, get_args, get_origin, get_type_hints

import algos.config
import algos.presets
from algos.finetuning.reward_model import RewardModelConfig
from algos.finetuning.sft import SFTConfig
from algos.recipe import Recipe

project, author = "textenv", "the textenv contributors"
release = version = installed(project)
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_llms_txt",
]  # fmt: skip
exclude_patterns = ["results/data"]
default_role = "py:obj"  # a name in single quotes of a docstring is a link, if there is something of that name

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False  # what stands before a colon in "Returns:" is mostly not a type
autodoc_inherit_docstrings = False  # what a class changes without a word is described in the class that it extends
llms_txt_summary = (
    "Text as a Gymnasium environment, and a modular RL kit whose one PPO trains CartPole and language models."
)

html_theme = "pydata_sphinx_theme"
html_title = "textenv and algos"
html_show_sourcelink = False
html_static_path, html_css_files = ["_static"], ["wide.css"]
html_theme_options = {
    "show_prev_next": False,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    # A page of results begins with a table that links to its sections.
    "secondary_sidebar_items": dict.fromkeys(("*", "tutorials/*", "concepts/*", "reference/*"), ["page-toc"]),
}


# The reference: what autodoc shows of configs, presets and attributes would be hard to read.
CONFIGS = [
    value for value in vars(algos.config).values() if isinstance(value, type) and issubclass(value, algos.config.Config)
] + [SFTConfig, RewardModelConfig]
ALLOWED = {}
"""By class and field of a config: which values it may have."""
for config in CONFIGS:
    types = get_type_hints(config, include_extras=True)
    for name in config.__annotations__:
        parts = get_args(types[name]) if get_origin(types[name]) is not Annotated else [types[name]]
        rules = [part.__metadata__[0] for part in parts if get_origin(part) is Annotated]
        ALLOWED[f"{config.__module__}.{config.__name__}.{name}"] = [getattr(rule, "expected", None) for rule in rules]
for config in CONFIGS:  # the rules are functions, whose addresses would be shown
    config.__annotations__ = {name: get_type_hints(config)[name] for name in config.__annotations__}


def differences(preset):
    """Return the settings of a preset that are not the defaults of its class, as a line of reST."""
    default = type(preset)()
    names = [field.name for field in fields(preset) if getattr(preset, field.name) != getattr(default, field.name)]
    settings = []
    for name in names:
        value = getattr(preset, name)
        if is_dataclass(value):
            settings.append(f"``{name}``: {differences(value)}")
        else:
            settings.append(f"``{name}={value!r}``")
    return f"`{type(preset).__name__}` with {', '.join(settings)}" if settings else f"`{type(preset).__name__}`"


def all_fields(config):
    """Return the names and defaults of a config's fields, with those that it inherits, each a link to what it says."""
    entries = []
    for field in fields(config):
        owner = next(parent for parent in config.__mro__ if field.name in vars(parent).get("__annotations__", {}))
        path = f"{owner.__module__}.{owner.__name__}.{field.name}"
        entries.append(f"`{field.name} <{path}>` ({field.default!r})")
    return f"All fields, and their defaults: {', '.join(entries)}."


def add_lines(app, what, name, thing, options, lines):
    """Add what a preset changes, which values a field may have, and which fields a config has."""
    if thing in CONFIGS:
        lines += [all_fields(thing), ""]
    elif isinstance(thing, (algos.config.Config, Recipe)) and name.startswith("algos.presets."):
        lines += [differences(thing), ""]
    elif any(ALLOWED.get(name, [])):
        lines += [f"Allowed: {' or '.join(filter(None, ALLOWED[name]))}.", ""]


DOCSTRINGS = {}
"""Of attributes, before napoleon reads them: it would take what stands before a colon for a type."""


def keep_docstring(app, what, name, thing, options, lines):
    """Remember a docstring that has no sections."""
    has_section = any(line.strip() in ("Raises:", "Returns:") for line in lines)
    if what in ("attribute", "data", "property") and not has_section:
        DOCSTRINGS[name] = list(lines)


def restore_docstring(app, what, name, thing, options, lines):
    """Undo what napoleon did to it."""
    if name in DOCSTRINGS:
        lines[:] = DOCSTRINGS.pop(name)


def shorten_signature(app, what, name, thing, options, signature, returns):
    """Show a config's constructor as what it is, and no config with all its fields as a default."""
    if thing in CONFIGS:
        return "(**fields)", None
    if signature and "Config(" in signature:
        return re.sub(r"(\w+Config)\([^()]*(?:\([^()]*\)[^()]*)*\)", r"\1()", signature), returns
    return None


def skip_member(app, what, name, thing, skip, options):
    """Leave out the fields of a named tuple that have no docstring of their own."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def setup(app):
    """Connect these functions to autodoc."""
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", keep_docstring, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", restore_docstring, priority=600)
    app.connect("autodoc-process-docstring", add_lines, priority=700)
    app.connect("autodoc-process-signature", shorten_signature)
