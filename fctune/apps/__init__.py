"""Rooms that stand alone: none imports another, and nothing in the library below imports them."""
