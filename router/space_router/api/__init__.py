"""The HTTP APIs: OpenAI, TGI, and operator routes."""
