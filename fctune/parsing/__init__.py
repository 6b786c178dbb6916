"""Strict and lenient readers of JSON and Python literals."""
