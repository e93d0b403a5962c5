"""How Sphinx builds this documentation: ``make docs``."""

from importlib import metadata

project = "aftexport"
release = metadata.version("aftexport")
copyright = "the aftexport authors, Apache License 2.0"  # the name that Sphinx reads

extensions = ["myst_parser"]
smartquotes = False  # it would join the dashes of options
html_theme = "furo"
html_title = "aftexport"
html_show_sphinx = False

myst_heading_anchors = 3
