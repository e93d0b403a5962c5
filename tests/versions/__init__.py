"""The versions of Python, torch and other libraries with which aftexport is tried.

``make test-versions`` makes one environment of ``matrix.toml`` at a time, runs a part of the suite
in it and adds the outcome to ``record.json``, from which the documentation makes its table.
``make test-lower`` runs a part of the suite with the lower bounds of ``pyproject.toml``.
"""
