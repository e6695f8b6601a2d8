"""Reads GGUF files and says in Hugging Face's words what they hold."""
