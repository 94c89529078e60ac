"""Tolaria trains the hosts: it trains, validates and ablates N networks at once.

A backend does the arithmetic; the engine decides what to measure.
"""
