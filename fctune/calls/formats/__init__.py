"""Call formats, one file a family, each in both directions: calls to text and text to calls.

A format's file holds all its facts: syntax, the marks by which a chat template of it is recognised, the model families
that write it, and the names of the servers' parsers for it. A new file in this package is found by itself.
"""
