"""Whole documents against windows and truncation, on composed and real texts of licences."""
