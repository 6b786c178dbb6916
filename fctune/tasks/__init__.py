"""Cases that a model is given, its dialogues with tools, and their judgement."""
