"""Tolaria trains the hosts: an epoch of N networks at once, their validation and ablation.

A backend does the arithmetic; the engine decides what is measured.
"""
