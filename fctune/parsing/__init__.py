"""Strict and lenient readers of JSON and of Python literals; nothing read is ever evaluated."""
