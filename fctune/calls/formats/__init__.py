"""Call formats, each in both directions: calls to text and text to calls."""
