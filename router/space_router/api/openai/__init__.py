"""OpenAI's routes: completions, chat completions, responses, models."""
