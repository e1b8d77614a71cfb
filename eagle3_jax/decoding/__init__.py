"""Prompts to tokens: the compiled loop, and the calls around it."""
