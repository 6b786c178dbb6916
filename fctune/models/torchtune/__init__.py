"""Models that torchtune builds: Llama 3 and Qwen2. The only library package that imports torchtune."""
