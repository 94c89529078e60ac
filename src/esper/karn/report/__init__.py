"""The report: one HTML file that tells what runs did, without a network or a script in it."""

from esper.karn.report.page import write_report

__all__ = ["write_report"]
