"""How Sphinx builds this documentation: ``make docs``."""

import os
import sys
from importlib import metadata
from pathlib import Path

os.environ["COLUMNS"] = "88"  # the width of usages that argparse formats
sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "aftexport"
release = metadata.version("aftexport")
copyright = "the aftexport authors, Apache License 2.0"  # the name that Sphinx reads

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "reference",
]
smartquotes = False  # it would join the dashes of options
html_theme = "furo"
html_title = "aftexport"
html_show_sphinx = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
napoleon_numpy_docstring = False
# Types of torch, httpx2 and the standard library are documented elsewhere.
nitpick_ignore_regex = [("py:class", ".*")]
