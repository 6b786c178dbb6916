"""Llama 3 and Qwen2 models built by torchtune: shapes, names, weight layout and layers."""
