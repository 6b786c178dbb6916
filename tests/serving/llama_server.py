"""Run llama.cpp's server on a GGUF file until stdin closes: python llama_server.py FILE PORT CONTEXT."""

from __future__ import annotations

import sys

import xllamacpp

options = xllamacpp.CommonParams()
options.model.path = sys.argv[1]
options.port = int(sys.argv[2])
options.n_ctx = int(sys.argv[3])
options.n_parallel = 1
options.use_jinja = True
options.cpuparams.n_threads = 1  # threads that wait for each other are slow on a loaded machine
server = xllamacpp.Server(options)
sys.stdin.read()
