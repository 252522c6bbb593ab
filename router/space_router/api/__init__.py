"""The HTTP faces: OpenAI's, TGI's, and the operators'."""
