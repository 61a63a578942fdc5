"""A comparison as files: report.json for programs, report.md, and report.html, which needs nothing but a browser."""

from .charts import curves_of
from .header import header_of
from .layers import LayerReport, read_diagnosis
from .write import check_folder, write_report

__all__ = ["LayerReport", "check_folder", "curves_of", "header_of", "read_diagnosis", "write_report"]
