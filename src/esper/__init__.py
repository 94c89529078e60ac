"""Esper trains neural networks that grow while they train.

All N environments (each one a host network in mid-training) are one tensor program; a recurrent
policy, itself trained by PPO, decides at every step what should grow where.
"""

__version__ = "0.1.0"
