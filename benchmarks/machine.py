"""What a page of figures says of where and when they were taken."""

import os
import time

import torch

from esper.simic.run.run_directory import processor_name


def made_on(*more: str) -> str:
    """Version of torch, processor, ``more`` and today, with commas and without a full stop."""
    processor = f"{os.cpu_count()} x {processor_name()}"
    return ", ".join([f"torch {torch.__version__}", processor, *more, time.strftime("%Y-%m-%d")])
