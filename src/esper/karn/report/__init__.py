"""The report: one HTML file on what runs did, without a network or a script in it."""

from esper.karn.report.page import write_report

__all__ = ["write_report"]
