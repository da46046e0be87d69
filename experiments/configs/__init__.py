"""Configs: each file has `get_config([variant])` and says what it costs and what it reaches."""
