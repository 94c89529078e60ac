"""Tolaria trains, validates and ablates N hosts at once.

A backend does the arithmetic; the engine decides what to measure.
"""
