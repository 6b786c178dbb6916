"""HTML pages, each one file that needs no network, and terminal views of runs."""
