"""Anthropic's Messages API: fields, conversion to a chat, answers and routes."""
