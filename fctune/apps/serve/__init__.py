"""Serving of a model: vLLM started with the options that fit it, and exports for llama.cpp and Ollama."""
