"""Settings of the documentation site, which `make docs` builds into ``site/``: https://www.sphinx-doc.org."""

from importlib.metadata import version as installed

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
llms_txt_summary = (
    "Text as a Gymnasium environment, and a modular RL kit whose one PPO trains CartPole and language models."
)

html_theme = "pydata_sphinx_theme"
html_title = "textenv and algos"
html_show_sourcelink = False
html_static_path, html_css_files = ["_static"], ["wide.css"]
html_theme_options = {"show_prev_next": False, "navbar_align": "left", "header_links_before_dropdown": 6}
