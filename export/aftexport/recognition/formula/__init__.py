"""Formulas over named axes: terms, axes and a normal form."""
