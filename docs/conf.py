"""How Sphinx builds the site: `make docs`."""

import tomllib
from importlib.metadata import version as version_of
from pathlib import Path

project = "kvdock"
author = "The kvdock authors"
project_copyright = "The kvdock authors, Apache License 2.0"
release = version = version_of("kvdock")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "index"
exclude_patterns = ["README.md", "**/README.md"]
# Headings of three levels are targets of links, as where the files are shown alone.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
# Links to files of the repository that are not pages are copied as downloads.
# A name may be public in two packages: `kvdock` has the errors that all callers meet.
suppress_warnings = ["ref.python"]

# Options keep their two dashes.
smartquotes_action = "qe"

# One backtick is code, as in the docstrings.
default_role = "literal"
autodoc_typehints = "signature"
# A default is shown as its source: its value may be the builder's environment.
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
autoclass_content = "class"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"kvdock {version}"
_root = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
_repository = _root["tool"]["kvdock"]["repository"]
# As long as no repository is known, there is no link to it.
html_theme_options = {
    # Until then the names that pages install are free for others to take.
    "announcement": "kvdock 0.1.0 is not released: no package of that name on an index "
    "is ours. Install from a checkout: <code>make venv</code>."
}
if _repository:
    html_theme_options |= {
        "source_repository": _repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
myst_substitutions = {"version": version}
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["kvdock.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
copybutton_prompt_text = "$ "
