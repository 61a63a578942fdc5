"""A comparison as files: report.json for programs, report.md, and report.html, which needs nothing but a browser."""

from .write import LayerReport, check_folder, read_diagnosis, write_report

__all__ = ["LayerReport", "check_folder", "read_diagnosis", "write_report"]
