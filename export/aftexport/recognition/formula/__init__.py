"""Formulas over named axes: atoms, axes and a normal form."""
