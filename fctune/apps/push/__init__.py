"""Publishing of an export on the Hugging Face hub, with its model card."""
