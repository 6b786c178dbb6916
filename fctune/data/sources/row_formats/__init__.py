"""Public row formats, one module each; ``registry`` finds them."""
