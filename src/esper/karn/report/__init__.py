"""The report: one self-contained HTML file about one or more runs, without scripts."""

from esper.karn.report.page import write_report

__all__ = ["write_report"]
