"""Rows from tools alone: a teacher writes requests and answers them, and what does not agree is dropped."""
