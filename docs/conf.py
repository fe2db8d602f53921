"""How Sphinx builds the site: `make docs`."""

from importlib.metadata import version as version_of

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
myst_enable_extensions = ["colon_fence", "deflist"]
# Links to files of the repository that are not pages are copied as downloads.
# A name may be public in two packages: `kvdock` has the errors that all callers meet.
suppress_warnings = ["ref.python"]

# One backtick is code, as in the docstrings.
default_role = "literal"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
autoclass_content = "class"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "kvdock"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["kvdock.css"]
copybutton_prompt_text = "$ "
