"""Presentation of results: reports, tables, charts, HTML pages."""
